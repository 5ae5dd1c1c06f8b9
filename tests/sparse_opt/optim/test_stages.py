"""Stages of training with settings of their own: replay, dense and a plain loop agree, and a resumed run continues."""

from dataclasses import replace

import numpy as np
import pytest
from torch import nn
from torch.optim import lr_scheduler

from cowrec.sparse_opt import AdamConfig, ConstantClip, CowClip, EmbeddingAdam, FtrlConfig
from random_problems.drawing import small_problem
from random_problems.in_loops import row_gradients
from random_problems.training import assert_equal, batch_of, batches_of, sharded_model, state_of, train_step
from refusal import refused

pytest_plugins = ["one_group"]
pytestmark = pytest.mark.usefixtures("group")
CASE = small_problem(rows=(60, 5), features=(("a",), ("b",)), batch=8, dim=4, steps=80)
STAGES = {
    0: (AdamConfig(lr=1e-2, betas=(0.9, 0.999), eps=1e-6, l2=1e-4), ConstantClip(0.1)),
    7: (AdamConfig(lr=2e-2, betas=(0.9, 0.99), eps=3e-6, l2=1e-3), ConstantClip(0.3)),
    50: (AdamConfig(lr=3e-2, betas=(0.5, 0.6), eps=1e-5, l2=2e-3), ConstantClip(0.5)),
}
"""Settings after a number of steps."""


def started(absent_rows: str, epsilon: str) -> tuple[nn.Module, EmbeddingAdam]:
    model = sharded_model(CASE)
    config, rule = STAGES[0]
    return model, EmbeddingAdam(model, settings(config, absent_rows, epsilon), rule)


def settings(config: AdamConfig, absent_rows: str, epsilon: str) -> AdamConfig:
    return replace(config, absent_rows=absent_rows, adam_epsilon=epsilon)


def steps(model: nn.Module, optimizer: EmbeddingAdam, first: int, end: int) -> None:
    batches = batches_of(CASE)
    for step in range(first, end):
        if step and step in STAGES:
            config, rule = STAGES[step]
            old = optimizer.config
            optimizer.reconfigure(settings(config, old.absent_rows, old.adam_epsilon), rule)
        optimizer.lr = STAGES[max(each for each in STAGES if each <= step)][0].lr * (1 - step / 100)
        model(batches[step][0])[0].backward()


def plain_loop(epsilon: str) -> dict[str, np.ndarray]:
    """Adam in float64 on every row, with the products of all betas so far in its corrections."""
    state = {}
    for table, weights in enumerate(CASE.initial()[0]):
        w = weights.astype(np.float64)
        m, v, left1, left2 = np.zeros_like(w), np.zeros_like(w), 1.0, 1.0
        for step, (drawn,) in enumerate(CASE.batches()):
            config, rule = STAGES[max(each for each in STAGES if each <= step)]
            (beta1, beta2), lr = config.betas, config.lr * (1 - step / 100)
            g = row_gradients(CASE, CASE.collections[0], table, drawn, None)[0] + 2 * config.l2 * w
            g *= np.minimum(1, rule.max_norm / np.linalg.norm(g, axis=1, keepdims=True).clip(1e-30))
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            left1, left2 = left1 * beta1, left2 * beta2
            if epsilon == "keras":
                w -= lr * np.sqrt(1 - left2) / (1 - left1) * m / (np.sqrt(v) + config.eps)
            else:
                w -= lr * m / (1 - left1) / (np.sqrt(v / (1 - left2)) + config.eps)
        state |= {f"c0.t{table}": w, f"c0.t{table}.exp_avg": m, f"c0.t{table}.exp_avg_sq": v}
    return state


@pytest.mark.parametrize("epsilon", ["keras", "torch"])
def test_stages_equal_a_plain_loop(epsilon: str) -> None:
    """Replay and dense are bit-identical; the loop in float64 differs by the rounding of 80 steps in float32."""
    states = {}
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

    model, optimizer = started("replay", "torch")
    steps(model, optimizer, 0, saved_after)
    with optimizer.as_stored():
        saved = model.state_dict(), optimizer.state_dict()
    resumed, its_optimizer = started("replay", "torch")
    for after, (config, rule) in STAGES.items():
        if 0 < after < saved_after:
            its_optimizer.reconfigure(settings(config, "replay", "torch"), rule, after=after)
    with its_optimizer.as_stored():
        resumed.load_state_dict(saved[0])
        its_optimizer.load_state_dict(saved[1])
    for each in ((model, optimizer), (resumed, its_optimizer)):
        steps(*each, saved_after, CASE.steps)
    assert_equal(state_of(resumed, its_optimizer), state_of(model, optimizer))


def test_a_stage_without_a_rate_keeps_first_moments() -> None:
    """Rows miss more than the 32 steps after which a row that cannot move any more is at rest."""
    states = []
    for absent_rows in ("dense", "replay"):
        model = sharded_model(CASE)
        config = AdamConfig(lr=0.0, absent_rows=absent_rows)
        optimizer = EmbeddingAdam(model, config)
        for step in range(80):
            if step == 50:
                optimizer.reconfigure(replace(config, lr=1e-2))
            # The rows of one batch come in the first step alone.
            model(batches_of(CASE)[min(step, 1)][0])[0].backward()
        states.append(state_of(model, optimizer))
    assert_equal(*states)


def test_a_stage_leaves_the_rate_to_its_scheduler_unless_it_has_another_one() -> None:
    model, optimizer = started("replay", "torch")
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    rates = []
    for step, config in enumerate([{}, {}, {"l2": 1e-3}, {}, {"lr": 4e-2}, {}]):
        if config:
            optimizer.reconfigure(replace(optimizer.config, **config))
        rates.append(optimizer.lr)
        model(batches_of(CASE)[step][0])[0].backward()
        optimizer.step()
        scheduler.step()
    assert rates == [1e-2, 5e-3, 2.5e-3, 1.25e-3, 4e-2, 2e-2]


def test_what_cannot_change_is_refused() -> None:
    _, optimizer = started("replay", "torch")
    config = optimizer.config
    for given, rule, message in (
        (replace(config, absent_rows="lazy"), None, "absent_rows cannot change from 'replay' to 'lazy'"),
        (replace(config, adam_epsilon="keras"), None, "adam_epsilon cannot change"),
        (replace(config, wide=FtrlConfig(0.1)), None, "FTRL of wide columns cannot change from False to True"),
        (config, CowClip(1.0, 1e-5), "the clip rule cannot change from 'constant' to 'cowclip'"),
    ):
        refused(message, optimizer.reconfigure, given, rule)
    assert optimizer.config == config


@pytest.mark.parametrize("absent_rows", ["lazy", "replay"])
def test_a_step_before_the_settings_is_refused(absent_rows: str) -> None:
    """Of the first 100 steps, whose betas are no longer known, the optimizer has taken and loaded none."""
    model, optimizer = started(absent_rows, "torch")
    optimizer.reconfigure(replace(optimizer.config, betas=(0.9, 0.9)), after=100)
    before = state_of(model)
    refused("at step 1, but reconfigure.* after step 100; give it as `after`", train_step, CASE, model, 0)
    assert_equal(state_of(model), before)


def test_ftrl_needs_columns_and_values_in_range() -> None:
    config = replace(STAGES[0][0], wide=FtrlConfig(0.1))
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
