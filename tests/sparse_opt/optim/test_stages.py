"""Stages of training with settings of their own: replay, dense and a plain loop agree, and a resumed run continues."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cowrec.sparse_opt import AdamConfig, ConstantClip, CowClip, EmbeddingAdam
from cowrec.sparse_opt.algorithm.adam import BetaHistory
from sharded_case import Case, gathered, moments_of, process_group, row_gradients, sharded_model, train_step

CASE = Case(rows=(60, 5), features=(("a",), ("b",)), batch=8, dim=4, steps=80)
STAGES = {
    0: (AdamConfig(lr=1e-2, betas=(0.9, 0.999), eps=1e-6, l2=1e-4), ConstantClip(0.1)),
    7: (AdamConfig(lr=2e-2, betas=(0.9, 0.99), eps=3e-6, l2=1e-3), ConstantClip(0.3)),
    50: (AdamConfig(lr=3e-2, betas=(0.5, 0.6), eps=1e-5, l2=2e-3), ConstantClip(0.5)),
}
"""Settings after a number of steps."""


@contextmanager
def one_process() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, process_group(0, 1, folder):
        yield


def started(absent_rows: str, epsilon: str, stages: dict = STAGES) -> tuple[nn.Module, EmbeddingAdam]:
    model = sharded_model(CASE, CASE.draw()["tables"])
    config, rule = stages[0]
    return model, EmbeddingAdam(model, settings(config, absent_rows, epsilon), rule)


def settings(config: AdamConfig, absent_rows: str, epsilon: str) -> AdamConfig:
    return replace(config, absent_rows=absent_rows, adam_epsilon=epsilon)


def steps(model: nn.Module, optimizer: EmbeddingAdam, first: int, end: int, stages: dict = STAGES) -> None:
    drawn = CASE.draw()["steps"]
    for step in range(first, end):
        if step and step in stages:
            config, rule = stages[step]
            old = optimizer.config
            optimizer.reconfigure(settings(config, old.absent_rows, old.adam_epsilon), rule)
        optimizer.lr = stages[max(each for each in stages if each <= step)][0].lr * (1 - step / 100)
        train_step(CASE, model, *drawn[step], 0, CASE.batch)


def state_of(model: nn.Module, optimizer: EmbeddingAdam) -> dict[str, np.ndarray]:
    optimizer.flush()
    state = {key.split(".")[-2]: gathered(value) for key, value in model.state_dict().items()}
    return state | moments_of(optimizer)


def plain_loop(epsilon: str) -> dict[str, np.ndarray]:
    """Adam in float64 on every row, with the products of all betas so far in its corrections."""
    drawn, state = CASE.draw(), {}
    for table, weights in enumerate(drawn["tables"]):
        w = weights.astype(np.float64)
        m, v, left1, left2 = np.zeros_like(w), np.zeros_like(w), 1.0, 1.0
        for step, (bags, targets) in enumerate(drawn["steps"]):
            config, rule = STAGES[max(each for each in STAGES if each <= step)]
            (beta1, beta2), lr = config.betas, config.lr * (1 - step / 100)
            g = row_gradients(CASE, bags, targets, table)[0] + 2 * config.l2 * w
            g *= np.minimum(1, rule.max_norm / np.linalg.norm(g, axis=1, keepdims=True).clip(1e-30))
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            left1, left2 = left1 * beta1, left2 * beta2
            if epsilon == "keras":
                w -= lr * np.sqrt(1 - left2) / (1 - left1) * m / (np.sqrt(v) + config.eps)
            else:
                w -= lr * m / (1 - left1) / (np.sqrt(v / (1 - left2)) + config.eps)
        state |= {f"t{table}": w, f"t{table}.exp_avg": m, f"t{table}.exp_avg_sq": v}
    return state


@pytest.mark.parametrize("epsilon", ["keras", "torch"])
def test_stages_equal_a_plain_loop(epsilon: str) -> None:
    """Replay and dense are bit-identical; the loop in float64 differs by the rounding of 80 steps in float32."""
    states = {}
    with one_process():
        for absent_rows in ("replay", "dense"):
            model, optimizer = started(absent_rows, epsilon)
            steps(model, optimizer, 0, CASE.steps)
            states[absent_rows] = state_of(model, optimizer)
            optimizer.remove()
    for key, expected in plain_loop(epsilon).items():
        np.testing.assert_array_equal(states["replay"][key], states["dense"][key], err_msg=key)
        scale = abs(expected).max()
        np.testing.assert_allclose(states["dense"][key] / scale, expected / scale, rtol=1e-5, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("saved_after", [7, 20, 60])
def test_a_resumed_run_continues_bit_identically(saved_after: int) -> None:
    """Saved with the last step of a stage, whose rows are then still behind, and within the second and third stage."""

    def state_dicts(model: nn.Module, optimizer: EmbeddingAdam) -> tuple[Any, Any]:
        with optimizer.as_stored():
            return model.state_dict(), optimizer.state_dict()

    with one_process():
        model, optimizer = started("replay", "torch")
        steps(model, optimizer, 0, saved_after)
        saved = state_dicts(model, optimizer)
        resumed, its_optimizer = started("replay", "torch")
        for after, (config, rule) in STAGES.items():
            if 0 < after < saved_after:
                its_optimizer.reconfigure(settings(config, "replay", "torch"), rule, after=after)
        with its_optimizer.as_stored():
            resumed.load_state_dict(saved[0])
            its_optimizer.load_state_dict(saved[1])
        for each in ((model, optimizer), (resumed, its_optimizer)):
            steps(*each, saved_after, CASE.steps)
        continued = state_of(resumed, its_optimizer)
        for key, expected in state_of(model, optimizer).items():
            np.testing.assert_array_equal(continued[key], expected, err_msg=key)


def test_equal_stages_change_nothing() -> None:
    same = dict.fromkeys((0, 1, 40), STAGES[0])
    states = []
    with one_process():
        for stages in (same, {0: STAGES[0]}):
            model, optimizer = started("replay", "keras", stages)
            steps(model, optimizer, 0, CASE.steps, stages)
            states.append(state_of(model, optimizer))
            optimizer.remove()
    for key, expected in states[1].items():
        # Bias corrections are products of powers, which round once more where the stages change.
        np.testing.assert_allclose(states[0][key], expected, rtol=1e-6, atol=1e-9, err_msg=key)


def test_what_cannot_change_is_refused() -> None:
    with one_process():
        _, optimizer = started("replay", "torch")
        config = optimizer.config
        for given, rule, message in (
            (replace(config, absent_rows="lazy"), None, "absent_rows cannot change from 'replay' to 'lazy'"),
            (replace(config, adam_epsilon="keras"), None, "adam_epsilon cannot change"),
            (config, CowClip(1.0, 1e-5), "the clip rule cannot change from 'constant' to 'cowclip'"),
        ):
            with pytest.raises(ValueError, match=message):
                optimizer.reconfigure(given, rule)
        assert optimizer.config == config


def test_products_of_betas_equal_a_loop() -> None:
    history, first, second = BetaHistory((0.9, 0.99)), 1.0, 1.0
    for step in range(1, 12):
        if step in (4, 9):
            history = history.changed((0.8 / step, 0.9 / step), step - 1)
        first, second = first * history.betas[0], second * history.betas[1]
        assert history.products(step) == pytest.approx((first, second), rel=1e-12)
    assert BetaHistory((0.9, 0.0)).products(0) == (1.0, 1.0)
    assert torch.tensor(history.products(10_000)).eq(0).all()
