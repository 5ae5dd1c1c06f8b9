"""FTRL of wide columns: what it needs, and steps that do not depend on the size of the batch."""

from dataclasses import replace

import numpy as np
import pytest

from cowrec.sparse_opt import AdamConfig, EmbeddingAdam, FtrlConfig
from random_problems.drawing import small_problem
from random_problems.training import assert_equal, batch_of, sharded_model, state_of
from refusal import refused

pytest_plugins = ["one_group"]
pytestmark = pytest.mark.usefixtures("group")
CASE = small_problem(rows=(60, 5), features=(("a",), ("b",)), batch=8, dim=4)


def test_ftrl_needs_columns_and_values_in_range() -> None:
    config = AdamConfig(wide=FtrlConfig(0.1))
    message = "FTRL for the columns after clip_columns, but clip_columns is None; give"
    refused(message, EmbeddingAdam, sharded_model(CASE), config)
    refused("ftrl beta must be > 0 and finite, got 0", FtrlConfig, 0.1, 0.0)


def test_ftrl_moves_weights_alike_in_all_batch_sizes() -> None:
    """A row that occurs once in a batch gets the same steps from batches of 8 and of 4 samples."""
    moved = []
    for problem, told in ((CASE, False), (replace(CASE, pass_size=4), False), (replace(CASE, pass_size=4), True)):
        model = sharded_model(problem)
        config = AdamConfig(wide=FtrlConfig(0.1, 1e-2, batch_size=8 if told else problem.batch))
        optimizer = EmbeddingAdam(model, config, clip_columns=2)
        if told:
            optimizer.set_ftrl_samples(4)
        before = state_of(model)
        for step in range(20):
            rng, drawn = np.random.default_rng(step), {}
            for name in ("a", "b"):
                bags = [(np.full(n, 3), np.ones(n, np.float32)) for n in [1, *[0] * (problem.batch - 1)]]
                target = np.repeat(rng.normal(size=(1, 4)).astype(np.float32), problem.batch, 0)
                drawn |= {name: bags, f"target {name}": target}
            model(batch_of(problem, [drawn], 0, problem.batch))[0].backward()
        moved.append({key: value - before[key] for key, value in state_of(model).items()})
        optimizer.remove()
    assert_equal(moved[2], moved[1])
    for key, value in moved[0].items():
        np.testing.assert_allclose(value[:, 2:], moved[1][key][:, 2:], rtol=1e-5)
        assert abs(value[3, 2:]).min() > 0
