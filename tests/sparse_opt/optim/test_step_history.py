"""Scalars of steps are on the device before each step, whatever rates and returns to earlier steps came before."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cowrec.sparse_opt import AdamConfig
from cowrec.sparse_opt.algorithm.adam import adam_scalars
from cowrec.sparse_opt.optim.replay import StepHistory

RATES = (1e-2, 1e-3)
CONFIG = AdamConfig(lr=RATES[0], adam_epsilon="keras")


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(RATES), st.integers(1, 3), st.one_of(st.none(), st.integers(0, 5))), max_size=8)
)
def test_schedule_holds_the_scalars_of_every_step(runs: list[tuple[float, int, int | None]]) -> None:
    """Runs of steps at one rate, after some of which an earlier state is loaded, ``back`` steps before."""
    history, step = StepHistory(CONFIG, torch.device("cpu")), 0
    for lr, steps, back in runs:
        for _ in range(steps):
            step += 1
            history.prepare(step, lr)
            scheduled = [values[step - 1] for values in history.step_scalars]
            assert scheduled == [torch.tensor(value) for value in adam_scalars(CONFIG, lr, step)]
        if back is not None:
            step = max(step - back, 0)
            history.return_to(step)


@pytest.mark.parametrize("epsilon", ["keras", "torch"])
def test_a_loaded_history_has_the_scalars_of_every_step(epsilon: str) -> None:
    """Also beyond step 3,724, from which on corrections are 1 and many steps are computed at once."""
    config = replace(CONFIG, betas=(0.9, 0.99), weight_decay=0.1, adam_epsilon=epsilon)
    history, rates = StepHistory(config, torch.device("cpu")), np.random.default_rng(0).uniform(0, 1e-2, 6000)
    history.replace(rates)
    expected = torch.tensor([adam_scalars(config, lr, step) for step, lr in enumerate(rates.tolist(), 1)])
    assert torch.equal(torch.stack([values[:6000] for values in history.step_scalars], dim=1), expected)
