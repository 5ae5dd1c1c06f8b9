"""FBGEMM's COWCLIP mode behaves as the configuration documents it, which differs from CowClip.

Tested with fbgemm 1.8.0: it counts the steps in which a row appeared, and Adagrad accumulates the unclipped gradient.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cowrec.trainer.config.run import RunConfig, load_config
from cowrec.trainer.config.sections import ClipConfig, OptimizerConfig, TrainConfig
from cowrec.trainer.sharded_model.build import fused_params
from cowrec.trainer.sharded_model.run_plan import Scaled
from cowrec.trainer.training.loop import train
from cowrec.trainer.training.saved_run import evaluate_run
from sharded_case import Case, gather_tables, process_group, row_gradients, sharded_model, train_step
from trainer_cases import config_file, make_data

R, ZETA, LR, EPS = 0.5, 1e-3, 0.1, 1e-8


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    with process_group(0, 1, str(tmp_path)):
        yield


def trained(case: Case, halflife: int) -> list[np.ndarray]:
    optimizer = OptimizerConfig(embedding="fbgemm_cowclip", base_batch_size=1, embedding_lr=LR, l2=1e-5, eps=EPS)
    config = RunConfig(train=TrainConfig(batch_size=1), optimizer=optimizer, clip=ClipConfig(rule="none"))
    params = fused_params(config.optimizer, Scaled.of(config).hyperparameters)
    values = {"counter_halflife": halflife, "weight_norm_coefficient": R, "lower_bound": ZETA}
    params["cowclip_regularization"] = dataclasses.replace(params["cowclip_regularization"], **values)
    drawn = case.draw()
    model = sharded_model(case, drawn["tables"], fused_params=params)
    for bags, targets in drawn["steps"]:
        train_step(case, model, bags, targets, 0, case.batch)
    return gather_tables(case, model)


def trained_in_loops(case: Case, halflife: int) -> list[np.ndarray]:
    """Trains the case by the documented behaviour, in float64, row by row."""
    drawn = case.draw()
    tables = [table.astype(np.float64) for table in drawn["tables"]]
    counters = [np.zeros(len(table)) for table in tables]
    seen = [np.zeros(len(table), int) for table in tables]
    sums = [np.zeros(len(table)) for table in tables]
    for step, (bags, targets) in enumerate(drawn["steps"], start=1):
        for t, weights in enumerate(tables):
            grads, counts = row_gradients(case, bags, targets, t)
            for row in np.flatnonzero(counts):
                if halflife > 0:
                    passed = step - seen[t][row] if seen[t][row] else 1
                    counters[t][row] *= 0.5 ** (passed / halflife)
                elif halflife == 0:
                    counters[t][row] = 0
                counters[t][row] += 1
                seen[t][row] = step
                norm = np.linalg.norm(grads[row])
                limit = counters[t][row] * max(R * np.linalg.norm(weights[row]), ZETA)
                sums[t][row] += (grads[row] ** 2).mean()
                factor = min(1.0, limit / norm) if norm > 0 else 1.0
                weights[row] -= factor * LR * grads[row] / (np.sqrt(sums[t][row]) + EPS)
    return tables


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("halflife", [-1, 0, 2])
def test_it_counts_steps_and_accumulates_the_unclipped_gradient(halflife: int) -> None:
    case = Case(steps=6)
    for got, expected in zip(trained(case, halflife), trained_in_loops(case, halflife), strict=True):
        scale = np.abs(expected).max(1, keepdims=True) + 1e-3
        # Roots of sums of squares in float32.
        assert float((np.abs(got - expected) / scale).max()) <= 1e-5


def test_the_trainer_trains_and_loads_it(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    settings = ["optimizer.embedding=fbgemm_cowclip", "clip.rule=none", "optimizer.l2=0"]
    report = train(load_config(config_file(tmp_path), settings), data, tmp_path / "run")
    assert evaluate_run(tmp_path / "run", data)["auc"] == pytest.approx(report["auc"], abs=1e-7)
