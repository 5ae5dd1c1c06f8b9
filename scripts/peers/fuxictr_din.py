"""DIN of FuxiCTR's layers, which the package has without the model, trained on a prepared data set with a history.

Its Adam has dense gradients, its gradient clip is one norm over all parameters. Samples are in memory as tensors, ids
are one higher than stored, because 0 is FuxiCTR's padding. Its early stopping and its lower rate after an epoch that is
no better are left out.

B samples, L ids of the longest history.
"""

import json
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from fuxictr.features import FeatureMap
from fuxictr.pytorch.layers import DIN_Attention, FeatureEmbeddingDict, MLP_Block
from fuxictr.pytorch.models import BaseModel
from sklearn.metrics import roc_auc_score
from torch import Tensor

LABEL = "label"


class DIN(BaseModel):
    """The fields' embeddings, of the history those that the item attends to, then an MLP."""

    def __init__(self, features: FeatureMap, folder: str, job: dict[str, Any]) -> None:
        super().__init__(features, verbose=0, model_root=folder, metrics=["AUC"])
        width = job["embedding_dim"]
        self.item, self.history = job["item"], job["history"]
        self.embeddings = FeatureEmbeddingDict(features, width)
        self.attention = DIN_Attention(width, [job["attention"]], hidden_activations=job["activation"])
        inputs, last = len(features.features) * width, self.output_activation
        self.mlp = MLP_Block(inputs, job["hidden"], output_dim=1, output_activation=last)
        self.compile("adam", "binary_crossentropy", lr=1e-3)
        self.reset_parameters()
        self._max_gradient_norm = 10.0  # set by `fit` before its first step

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        fields = self.get_inputs(inputs)
        embedded = self.embeddings(fields)
        mask = fields[self.history] != 0
        embedded[self.history] = self.attention(embedded[self.item], embedded[self.history], mask)
        return {"y_pred": self.mlp(self.embeddings.dict2tensor(embedded, flatten_emb=True))}


def columns(folder: Path, fields: list[dict[str, Any]]) -> dict[str, Tensor]:
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


def main() -> None:
    """Trains the job of the command line, and writes test AUC by epoch, samples a second, and versions."""
    job = json.loads(sys.argv[1])
    data = Path(job["data"])
    fields = json.loads((data / "schema.json").read_text(encoding="utf-8"))["sparse"]
    folder = tempfile.gettempdir()
    features = FeatureMap("histories", folder)
    features.labels = [LABEL]
    for field in fields:
        kind = {"type": "sequence", "share_embedding": field["shares"]} if field["shares"] else {"type": "categorical"}
        features.features[field["name"]] = {"source": "", "vocab_size": field["num_embeddings"] + 1, **kind}
        features.features[field["name"]] |= {"padding_idx": 0} if field["name"] in (job["item"], job["history"]) else {}
    features.num_fields = features.get_num_fields()
    train, test = (columns(data / split, fields) for split in ("train", "test"))
    torch.manual_seed(job["seed"])
    model = DIN(features, folder, job)
    seconds, aucs = 0.0, []
    for _ in range(job["epochs"]):
        model.train()
        started = time.perf_counter()
        for batch in torch.randperm(len(train[LABEL])).split(job["batch_size"]):
            model.train_step({name: column[batch] for name, column in train.items()}).item()
        seconds += time.perf_counter() - started
        model.eval()
        with torch.no_grad():
            parts = torch.arange(len(test[LABEL])).split(16384)
            predicted = [model({name: column[part] for name, column in test.items()})["y_pred"] for part in parts]
        aucs.append(roc_auc_score(test[LABEL], torch.cat(predicted)))
    versions = {"python": python_version()} | {name: version(name) for name in ("fuxictr", "torch")}
    speed = job["epochs"] * len(train[LABEL]) / seconds
    result = {"auc": aucs, "samples_per_second": speed, "versions": versions}
    Path(job["result"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
