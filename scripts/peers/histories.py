"""Training of a peer's network of histories on a prepared data set, whose samples are in memory as tensors.

Ids are one higher than stored, because 0 is the padding. B samples, L ids of the longest history.
"""

import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

LABEL = "label"
Samples = dict[str, Tensor]


def columns(folder: Path, fields: list[dict[str, Any]]) -> Samples:
    """Labels, ids [B], and histories [B, L], with zeros before the oldest id."""
    table, found = pq.read_table(sorted(folder.glob("*.parquet"))).combine_chunks(), {}
    for field in fields:
        column, length = table[field["name"]].combine_chunks(), field["max_length"]
        if length:
            ends = column.offsets.to_numpy()[1:]
            ages = np.arange(length, 0, -1)
            present = ages <= np.diff(column.offsets.to_numpy())[:, None]
            ids = np.where(present, column.values.to_numpy()[np.maximum(ends[:, None] - ages, 0)] + 1, 0)
        else:
            ids = column.to_numpy() + 1
        found[field["name"]] = torch.from_numpy(ids.astype(np.int64))
    return found | {LABEL: torch.from_numpy(table[LABEL].to_numpy().astype(np.float32))}


def work(
    build: Callable[[list[dict[str, Any]], dict[str, Any]], tuple[nn.Module, Callable[[Samples], Any]]],
    predict: Callable[[nn.Module, Samples], Tensor],
    packages: list[str],
) -> None:
    """Trains the job of the command line, and writes test AUC by epoch, samples a second, and versions.

    Args:
        build: makes, from the fields of the schema and the job, a model and its step.
        predict: the scores [B] of samples.
    """
    job = json.loads(sys.argv[1])
    data = Path(job["data"])
    fields = json.loads((data / "schema.json").read_text(encoding="utf-8"))["sparse"]
    train, test = (columns(data / split, fields) for split in ("train", "test"))
    torch.manual_seed(job["seed"])
    model, step = build(fields, job)
    seconds, aucs = 0.0, []
    for _ in range(job["epochs"]):
        model.train()
        started = time.perf_counter()
        for batch in torch.randperm(len(train[LABEL])).split(job["batch_size"]):
            step({name: column[batch] for name, column in train.items()})
        seconds += time.perf_counter() - started
        model.eval()
        with torch.no_grad():
            parts = torch.arange(len(test[LABEL])).split(16384)
            predicted = [predict(model, {name: column[part] for name, column in test.items()}) for part in parts]
        aucs.append(roc_auc_score(test[LABEL], torch.cat(predicted)))
    versions = {"python": python_version()} | {name: version(name) for name in packages}
    speed = job["epochs"] * len(train[LABEL]) / seconds
    Path(job["result"]).write_text(
        json.dumps({"auc": aucs, "samples_per_second": speed, "versions": versions}), encoding="utf-8"
    )
