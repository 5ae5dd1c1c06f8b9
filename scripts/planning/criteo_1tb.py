"""Rehearses DeepFM on Criteo 1TB on 8, 64 and 512 GPUs, without the data set: `docs/planning.md` has the table.

    python scripts/planning/criteo_1tb.py --output results/plans/criteo_1tb.jsonl

The vocabularies are those that DLRM's preparation finds in all 24 days (github.com/facebookresearch/dlrm, without a
limit): 882,774,559 ids. Ids are drawn log-uniformly by frequency rank, as in MLPerf's reference, and repeat after
65,536 samples. Batches have 1,024 samples for each GPU. Of each plan one rank is rehearsed, one with the most bytes of
tables.
"""

import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.data_pipeline import Batch, DenseField, Schema, SparseField
from cowrec.trainer.config.run import config_from
from cowrec.trainer.planning.cluster import PRESETS, Cluster
from cowrec.trainer.planning.plan import Plan, plan_batch
from cowrec.trainer.planning.samples import GlobalBatch
from cowrec.trainer.planning.text import plan_values
from cowrec.trainer.reports.text_table import aligned
from cowrec.trainer.runs.provenance import environment
from cowrec.trainer.runtime.environment import prepare_process

ROWS = (
    *(227_605_432, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 130_229_467, 3_067_956, 405_282, 10),
    *(2_209, 11_938, 155, 4, 976, 14, 292_775_614, 40_790_948, 187_188_510, 590_152, 12_973, 108, 36),
)
SAMPLES, BATCH_OF_GPU, DRAWN = 4_373_472_329, 1024, 1 << 16
SMALL = 50_000
"""Tables up to this size are stored complete on every rank under "mixed"."""


def main() -> None:
    prepare_process()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--cluster", default="dgx-h100", choices=PRESETS)
    given = parser.parse_args()
    given.output.parent.mkdir(parents=True, exist_ok=True)
    with given.output.open("w", encoding="utf-8") as file:
        lines = []
        for hosts in given.hosts:
            for width in given.widths:
                for line in rehearsed(dataclasses.replace(PRESETS[given.cluster], hosts=hosts), width):
                    lines.append(line)
                    file.write(json.dumps(line) + "\n")
                    file.flush()
                    print(aligned([HEAD, _cells(line)]), flush=True)
    print(aligned([HEAD, *map(_cells, lines)]))


def rehearsed(cluster: Cluster, width: int) -> Iterator[dict[str, Any]]:
    """Lines of the result: the plans of a cluster for a stored width, that of the wide weight included."""
    raw = {"id_table": {"kind": "collisionless", "capacity": sum(ROWS) // len(ROWS)}}
    cases: dict[str, dict[str, Any]] = {
        "row_wise": {"sharding": {"plan": "row_wise", "tables": _small("table_wise", cluster.ranks)}},
        "row_wise, uvm": {
            "sharding": {"plan": "row_wise", "memory": "uvm", "tables": _small("table_wise", cluster.ranks)}
        },
        "table_row_wise": {"sharding": {"plan": "table_row_wise", "tables": _small("table_wise", cluster.devices)}},
        "column_wise": {"sharding": {"plan": "column_wise"}},
        "mixed": {"sharding": {"plan": "table_row_wise", "tables": _small("data_parallel", SMALL)}},
        "row_wise, raw ids": {"sharding": {"plan": "row_wise"}, **raw},
    }
    for name, sections in cases.items():
        about = {"plan": name, "width": width, "gpus": cluster.ranks}
        try:
            made = _plan(cluster, width, sections)
        except ValueError as error:
            yield {**about, "refused": str(error)}
            continue
        yield {**about, **plan_values(made), **environment(torch.device("cpu"))}


def _small(kind: str, most_rows: int) -> dict[str, str]:
    return {f"C{number}": kind for number, rows in enumerate(ROWS) if rows < most_rows or rows <= 64}


def _plan(cluster: Cluster, width: int, sections: dict[str, Any]) -> Plan:
    size = BATCH_OF_GPU * cluster.ranks
    raw = "id_table" in sections
    config = config_from(
        {
            "train": {"batch_size": size, "device": cluster.device},
            "model": {"embedding_dim": width - 1},  # the wide weight is stored with it
            "optimizer": {"l2": 1e-6},
            **sections,
        }
    )
    sparse = tuple(
        SparseField(f"C{number}", 0 if raw else rows, encoding="raw" if raw else "vocabulary")
        for number, rows in enumerate(ROWS)
    )
    schema = Schema("criteo", tuple(DenseField(f"I{number}") for number in range(13)), sparse, splits={})
    rows = [sections["id_table"]["capacity"]] * len(ROWS) if raw else ROWS
    return plan_batch(config, schema, GlobalBatch(_samples(rows), size), cluster, SAMPLES, most_kinds=1)


def _samples(rows: Any) -> Batch:
    uniform = torch.rand(len(rows), DRAWN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids = (torch.tensor(rows, dtype=torch.float64)[:, None] ** uniform).long() - 1
    keys = [f"C{number}" for number in range(len(rows))]
    sparse = KeyedJaggedTensor(keys, ids.flatten().int(), lengths=torch.ones(ids.numel(), dtype=torch.int32))
    sparse.offsets()
    return Batch(torch.zeros(DRAWN, 13), sparse, torch.zeros(DRAWN))


HEAD = (
    "plan",
    "width",
    "GPUs",
    "fits",
    "GB a GPU",
    "GB a host",
    "MB sent",
    "of the clip",
    "step ms",
    "bound",
    "epoch min",
)


def _cells(line: dict[str, Any]) -> tuple[str, ...]:
    about = (line["plan"], str(line["width"]), str(line["gpus"]))
    if "refused" in line:
        return (*about, "refused", *[""] * 7)
    slowest = max(line["ranks"], key=lambda rank: rank["step_seconds"])
    sent = Counter(slowest["sent"])
    clip = sum(size for name, size in sent.items() if name.startswith("clip"))
    part = max(slowest["time"], key=lambda name: slowest["time"][name]["seconds"])
    return (
        *about,
        "no" if line["misfits"] else "yes",
        f"{max(rank['device_bytes'] for rank in line['ranks']) / 1e9:.1f}",
        f"{max(rank['host_bytes'] for rank in line['ranks']) * line['cluster']['devices'] / 1e9:.0f}",
        f"{sum(sent.values()) / 1e6:.1f}",
        f"{clip / 1e6:.1f}",
        f"{1e3 * line['step_seconds']:.2f}",
        f"{part}: {slowest['time'][part]['bound']}",
        f"{line['epoch_seconds'] / 60:.1f}",
    )


if __name__ == "__main__":
    main()
