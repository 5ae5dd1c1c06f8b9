"""Whatever the plan and the number of processes, the same batches give the same weights under CowClip."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sharded_case import Case, run_in_processes
from test_attach import attach, assert_follows_loops, case_of

PLANS = ("table_wise", "column_wise", "columns_of_one_rank", "column_wise,row_wise,columns_of_one_rank")


def test_spike() -> None:
    import sys
    for world in (1, 2, 4):
        cases = [replace(case_of(kind, opt), sharding=plan) for plan in PLANS for opt in ("sgd", "adagrad", "adam") for kind in ("several and repeated ids, empty bags, a shared table", "weights", "only the leading columns", "no ids in half of the batch", "mean") if not ("," in plan and kind == "mean")]
        got = run_in_processes([(case, attach) for case in cases], world)
        if world == 1:
            base = got
        for case, tables, one in zip(cases, got, base):
            assert_follows_loops(case, tables)
            print(world, case.sharding, case.optimizer, [np.array_equal(a, b) for a, b in zip(tables, one)], max(abs(a-b).max() for a,b in zip(tables, one)), file=sys.stderr)
