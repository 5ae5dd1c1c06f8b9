"""The same global batches give the same weights and moments under every sharding plan and number of processes.

All are bit-identical to one process with table-wise tables, because every sum is in float64 in the order of the batch;
the random problems and test_replay.py compare that one with plain loops. The order of sums differs for data-parallel
tables, for row-wise tables over two hosts, and where several passes of several ranks make a step: float32 may then
round differently, and rows are equal within 1e-6 of their largest value.
"""

from itertools import product
from typing import Any

import numpy as np
import pytest

from random_problems.drawing import ADAM, STOCK, Problem, small_problem
from random_problems.training import Trained, Trainers, assert_equal

SPLIT, MIXED = "row_wise,columns_of_one_rank,column_wise", "column_wise,data_parallel,table_wise"
PLANS = ("table_wise", "row_wise", "column_wise", "table_row_wise", "grid_shard", "data_parallel", SPLIT, MIXED)
KINDS: dict[str, dict[str, Any]] = {
    "several and repeated ids, empty bags, a shared table": {},
    "weights": {"weighted": True},
    "sequences": {"sequence": True, "weighted": True},
    "a variable batch size": {"variable_batch": True},
    "two passes for a step": {"passes": 2},
    "leading columns": {"clip_columns": 5},
    "an excluded table": {"exclude": ((0, 0),)},  # of four ranks one then holds no clipped columns
    "no ids in half of the batch, ranks without rows": {"idle": (1,), "parts": 2, "rows": (40, 2, 300)},
}
# FBGEMM has no dense lookups of sequences and variable batches on CPU, and TorchRec no table-row-wise sequences.
PLANS_OF_KIND = {
    "sequences": (SPLIT,),
    "a variable batch size": (SPLIT, "table_row_wise"),
    "two passes for a step": (SPLIT, MIXED),
}
OPTIMIZERS = ("sgd", "replay", "adagrad", "lazy", "rowwise_adagrad", "dense")


def cases(thorough: bool) -> dict[tuple[str, str], dict[str, Any]]:
    """Every plan with half of the kinds, if it supports them, and the optimizers in turn; all share a table.

    The first tiers have every plan and every kind at least once.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for (k, kind), (p, plan) in product(enumerate(KINDS), enumerate(PLANS)):
        if (k + p) % 2 or plan not in PLANS_OF_KIND.get(kind, PLANS):
            continue
        if not thorough and {kind, plan} <= {name for key in found for name in key}:
            continue
        # Row-wise Adagrad has one state for each column shard, and torch has no dense one.
        whole = not any(name in plan for name in ("column", "grid", "data_parallel"))
        optimizers = [name for name in OPTIMIZERS if whole or name != "rowwise_adagrad"]
        optimizers = [name for name in optimizers if (kind, name) != ("a variable batch size", "adagrad")]
        optimizer = optimizers[(k // 2 + p) % len(optimizers)]
        more = {"lr": 1e-2, "l2": 1e-3, "eps": 1e-6} if optimizer in ADAM else {}
        if kind == "leading columns" and optimizer in STOCK:
            more = {"max_ids": 1, "single_id_bags": True}
        found[kind, plan] = {"optimizer": optimizer, **KINDS[kind], **more}
    return found


def problem_of(case: dict[str, Any], plan: str, world: int) -> Problem:
    """The problem of a case; it has the same batches in any number of processes."""
    return small_problem(sharding=plan, world=world, rule=("cowclip", {"r": 1.0, "zeta": 1e-3}), **case)


@pytest.fixture(scope="module")
def expected(thorough: bool) -> dict[tuple[str, str], Trained]:
    """Trains all cases in one process, table-wise."""
    with Trainers(1) as processes:
        return {key: processes.train(problem_of(case, "table_wise", 1))[0] for key, case in cases(thorough).items()}


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_all_plans_train_the_same(processes: int, expected: dict[tuple[str, str], Trained], thorough: bool) -> None:
    """Four processes train one case of each plan, and what needs two hosts."""
    chosen = cases(thorough)
    these = [key for key in chosen if processes == 4 or key[1] != "grid_shard"]
    if processes == 4:
        these = list({(plan, chosen[kind, plan].get("passes")): (kind, plan) for kind, plan in these}.values())
    with Trainers(processes) as trained:
        for kind, plan in these:
            problem = problem_of(chosen[kind, plan], plan, processes)
            state, reference = trained.train(problem)[0].state, expected[kind, plan].state
            over_hosts = plan in ("table_row_wise", "grid_shard") and processes == 4
            if not (over_hosts or problem.passes > 1 or "data_parallel" in plan):
                assert_equal(state, reference)
                continue
            assert state.keys() == reference.keys()
            for key, value in reference.items():
                scale = np.abs(value).max(1, keepdims=True) + 1e-9
                assert (np.abs(state[key] - value) / scale).max() <= 1e-6, f"{key} of {kind}, {plan}"
