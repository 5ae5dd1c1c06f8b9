"""The formulas of docs/scaling.md for the bytes that a process sends are those of rehearsed steps."""

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.data_pipeline import Batch, Schema, SparseField
from cowrec.trainer.config.run import config_from
from cowrec.trainer.planning.cluster import Cluster
from cowrec.trainer.planning.plan import Plan, plan_batch
from cowrec.trainer.planning.samples import GlobalBatch
from cowrec.trainer.planning.text import sent_by_part

P, b, F, d, ROWS = 4, 32, 8, 16, 1000
B = P * b


def planned(kind: str) -> Plan:
    """Every process has an even share of all tables."""
    generator = torch.Generator().manual_seed(0)
    keys, ids = [f"C{n}" for n in range(F)], torch.randint(ROWS, (F * B,), generator=generator, dtype=torch.int32)
    sparse = KeyedJaggedTensor(keys, ids, lengths=torch.ones(F * B, dtype=torch.int32))
    sparse.offsets()
    batch = GlobalBatch(Batch(torch.zeros(B, 0), sparse, torch.zeros(B)), B)
    config = config_from(
        {
            "train": {"batch_size": B, "device": "cpu"},
            "model": {"embedding_dim": d - 1, "hidden": [8]},
            "optimizer": {"l2": 1e-5},
            "sharding": {"plan": kind},
        }
    )
    schema = Schema("even", (), tuple(SparseField(key, ROWS) for key in keys), splits={})
    return plan_batch(config, schema, batch, Cluster(hosts=2, devices=2, device="cpu"), B)


SIZES = 8 * P * 3
"""Of the exchange that precedes the ids: for each process two numbers of elements and the number of samples."""
U = b * F
"""Most distinct rows of a slice."""


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("table_wise", {"ids": 8 * b * F, "rows": 4 * d * b * F, "row_gradients": 4 * d * b * F, "clip": 0}),
        ("row_wise", {"ids": 4 * (b + B) * F, "rows": 4 * d * B * F, "row_gradients": 4 * d * b * F, "clip": 0}),
        (
            "column_wise",
            {"ids": 8 * 4 * b * F, "rows": 4 * d * b * F, "row_gradients": 4 * d * b * F, "clip": 16 * 4 * b * F},
        ),
    ],
)
def test_formulas_of_sharded_tables(kind: str, expected: dict[str, int]) -> None:
    plan = planned(kind)
    assert sum(len(each.ranks) for each in plan.kinds) == P
    for each in plan.kinds:
        sent = dict.fromkeys(expected, 0)
        for (part, _), size in sent_by_part(each).items():
            if part in sent:
                sent[part] += size
        assert sent | {"ids": sent["ids"] - SIZES} == expected


def test_formula_of_data_parallel_tables() -> None:
    for each in planned("data_parallel").kinds:
        sent = sum(size for (part, _), size in sent_by_part(each).items() if part == "data_parallel_rows")
        assert 0 < sent <= 8 + 8 * (d + 3) * U
        assert not any(part in ("ids", "rows", "row_gradients") for part, _ in sent_by_part(each))
