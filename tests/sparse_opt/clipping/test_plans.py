"""The same global batches give the same weights and moments under every sharding plan and number of processes.

All are bit-identical to one process with table-wise tables, because every sum is in float64 in the order of the batch;
the random problems and test_replay.py compare that one with plain loops. The order of sums differs for data-parallel
tables, for row-wise tables over two hosts, and where several passes of several ranks make a step: float32 may then
round differently, and rows are equal within 1e-6 of their largest value.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from torch import nn

from cowrec.sparse_opt import AdamConfig, CowClip, EmbeddingAdam, attach_cowclip
from sharded_case import Case, states_in_processes

RULE = CowClip(r=1.0, zeta=1e-3)
PLANS = (
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "grid",
    "data_parallel",
    "row_wise,columns_of_one_rank,column_wise",
    "column_wise,data_parallel,table_wise",
)
PROCESSES = {"grid": 4}  # two hosts
KINDS: dict[str, dict[str, Any]] = {
    "several and repeated ids, empty bags, a shared table": {},
    "weights": {"weighted": True},
    "sequences": {"sequence": True, "weighted": True},
    "a variable batch size": {"variable_batch": True},
    "two passes for a step": {"passes": 2},
    "leading columns": {"extra": {"clip_columns": 5}},
    "an excluded table": {"extra": {"exclude": ["t0"]}},  # of four ranks one then holds no clipped columns
    "no ids in half of the batch, ranks without rows": {"empty_half": True, "rows": (40, 2, 300)},
}
# FBGEMM has no dense lookups of sequences and variable batches on CPU, and TorchRec no table-row-wise sequences.
PLANS_OF_KIND = {
    "sequences": ("row_wise,columns_of_one_rank,column_wise",),
    "a variable batch size": ("row_wise,columns_of_one_rank,column_wise", "table_row_wise"),
    "two passes for a step": ("row_wise,columns_of_one_rank,column_wise", "column_wise,data_parallel,table_wise"),
}
ADAM = ("lazy", "dense", "replay")
OPTIMIZERS = ("sgd", "replay", "adagrad", "lazy", "rowwise_adagrad", "dense")


def attach(model: nn.Module, case: Case) -> Any:
    if case.optimizer in ADAM:
        config = AdamConfig(lr=1e-2, l2=1e-3, eps=1e-6, absent_rows=case.optimizer)
        return EmbeddingAdam(model, config, RULE, **case.extra)
    single = {"single_id_bags": True} if "clip_columns" in case.extra else {}
    return attach_cowclip(model, RULE, **case.extra, **single)


def cases() -> list[Case]:
    """Every plan with half of the kinds, if it supports them, and the optimizers in turn; all share a table."""
    found = []
    for (k, kind), (p, plan) in product(enumerate(KINDS), enumerate(PLANS)):
        if (k + p) % 2 or plan not in PLANS_OF_KIND.get(kind, PLANS):
            continue
        # Row-wise Adagrad has one state for each column shard, and torch has no dense one.
        whole = not any(each in plan for each in ("column", "grid", "data_parallel"))
        optimizers = [each for each in OPTIMIZERS if whole or each != "rowwise_adagrad"]
        optimizers = [each for each in optimizers if (kind, each) != ("a variable batch size", "adagrad")]
        optimizer = optimizers[(k // 2 + p) % len(optimizers)]
        more = {"max_ids": 1} if kind == "leading columns" and optimizer not in ADAM else {}
        found.append(Case(optimizer=optimizer, sharding=plan, steps=3, **KINDS[kind], **more))
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, np.ndarray]]:
    """Trains all cases in one process, table-wise."""
    alone = {repr(replace(case, sharding="table_wise")): replace(case, sharding="table_wise") for case in cases()}
    states = states_in_processes([(case, attach) for case in alone.values()], 1)
    return dict(zip(alone, states, strict=True))


@pytest.mark.parametrize("processes", [2, 4])
def test_all_plans_train_the_same(processes: int, expected: dict[str, dict[str, np.ndarray]]) -> None:
    """Four processes train one case of each plan, and what needs two hosts."""
    these = [case for case in cases() if processes >= PROCESSES.get(case.sharding, 1)]
    if processes == 4:
        these = list({(case.sharding, case.passes): case for case in these}.values())
    states = states_in_processes([(case, attach) for case in these], processes)
    for case, state in zip(these, states, strict=True):
        reference = expected[repr(replace(case, sharding="table_wise"))]
        assert state.keys() == reference.keys()
        for key, value in reference.items():
            what = f"{key} of {case}"
            over_hosts = case.sharding in ("table_row_wise", "grid") and processes == 4
            several_passes = case.passes > 1 and processes > 1
            if over_hosts or several_passes or "data_parallel" in case.sharding:
                scale = np.abs(value).max(1, keepdims=True) + 1e-9
                assert (np.abs(state[key] - value) / scale).max() <= 1e-6, what
            else:
                np.testing.assert_array_equal(state[key], value, err_msg=what)
