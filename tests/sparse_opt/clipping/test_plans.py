"""The same global batches give the same weights and moments under every sharding plan and number of processes.

All are bit-identical to one process with table-wise tables, because every sum is in float64 in the order of the batch;
test_attach.py and test_replay.py compare that one with plain loops. The order of sums differs for data-parallel tables
and for row-wise tables over two hosts: float32 may then round differently, and rows are equal within 1e-6 of their
largest value.
"""

from dataclasses import replace
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
    "data_parallel",
    "row_wise,columns_of_one_rank,column_wise",
    "column_wise,data_parallel,table_wise",
)
KINDS: dict[str, dict[str, Any]] = {
    "several and repeated ids, empty bags, a shared table": {},
    "weights": {"weighted": True},
    "leading columns": {"extra": {"clip_columns": 5}},
    "an excluded table": {"extra": {"exclude": ["t0"]}},  # of four ranks one then holds no clipped columns
    "no ids in half of the batch, ranks without rows": {"empty_half": True, "rows": (40, 2, 300)},
}
STOCK = ("sgd", "adagrad", "rowwise_adagrad")
ADAM = ("lazy", "dense", "replay")


def attach(model: nn.Module, case: Case) -> Any:
    if case.optimizer in ADAM:
        config = AdamConfig(lr=1e-2, l2=1e-3, eps=1e-6, absent_rows=case.optimizer)
        return EmbeddingAdam(model, config, RULE, **case.extra)
    single = {"single_id_bags": True} if "clip_columns" in case.extra else {}
    return attach_cowclip(model, RULE, **case.extra, **single)


def cases() -> list[Case]:
    """Lists every optimizer with every plan that it supports, all with a shared table and repeated ids."""
    found = []
    for optimizer in (*STOCK, *ADAM):
        for kind, settings in KINDS.items():
            if kind != next(iter(KINDS)) and optimizer not in ("sgd", "replay"):
                continue
            for plan in PLANS:
                # Replicated tables have no fused optimizer; row-wise Adagrad has one state for each column shard.
                no_state = optimizer == "rowwise_adagrad" and "column" in plan
                if no_state or (optimizer in STOCK and "data_parallel" in plan):
                    continue
                more = {"max_ids": 1} if kind == "leading columns" and optimizer in STOCK else {}
                found.append(Case(optimizer=optimizer, sharding=plan, steps=3, **settings, **more))
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, np.ndarray]]:
    """Trains all cases in one process, table-wise."""
    alone = {repr(replace(case, sharding="table_wise")): replace(case, sharding="table_wise") for case in cases()}
    states = states_in_processes([(case, attach) for case in alone.values()], 1)
    return dict(zip(alone, states, strict=True))


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_all_plans_train_the_same(processes: int, expected: dict[str, dict[str, np.ndarray]]) -> None:
    states = states_in_processes([(case, attach) for case in cases()], processes)
    for case, state in zip(cases(), states, strict=True):
        reference = expected[repr(replace(case, sharding="table_wise"))]
        assert state.keys() == reference.keys()
        for key, value in reference.items():
            what = f"{key} of {case}"
            over_hosts = case.sharding == "table_row_wise" and processes == 4
            if over_hosts or "data_parallel" in case.sharding:
                scale = np.abs(value).max(1, keepdims=True) + 1e-9
                assert (np.abs(state[key] - value) / scale).max() <= 1e-6, what
            else:
                np.testing.assert_array_equal(state[key], value, err_msg=what)
