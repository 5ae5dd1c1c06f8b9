"""Ways to keep ten epochs from overfitting at 128 times the batch, in plain PyTorch with dense Adam and without a clip.

    python scripts/research/large_batch/regularisers.py --data DATA/criteo --config TUNED.toml -o FILE.jsonl

Base values are those of the TOML file, scaled by `half_life`. Each run appends a line with AUC and logloss of the test
split after each epoch; a run that has one is not repeated. Fields of several ids are left out.
"""

import argparse
import dataclasses
import json
import math
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from sklearn.metrics import log_loss, roc_auc_score
from torch import Tensor, nn

from cowrec.data_pipeline import Schema
from cowrec.sparse_opt import Hyperparameters, scale_hyperparameters
from cowrec.trainer.runtime.environment import environment

DIM, EVALUATED = 10, 16384


@dataclasses.dataclass(frozen=True)
class Method:
    """What differs from Adam with L2 at the values of `half_life`.

    Attributes:
        l2: factor of L2.
        staleness: share of a row that is left out when it is touched, for each epoch since it was touched before, at
            most 1: AdamAR (arXiv 2511.06374), whose ``lr * alpha * I`` grows with I, the steps since then.
        fresh: tables and their moments begin each epoch anew (MEDA, arXiv 2305.19531).
        average: memory in epochs of the moving average of the weights that is evaluated.
        decays: both rates fall linearly to 0 over the run.
    """

    l2: float = 1.0
    staleness: float = 0.0
    fresh: bool = False
    average: float = 0.0
    decays: bool = False


METHODS = {
    "half_life": Method(),
    "linear": Method(decays=True),
    "l2 2": Method(l2=2.0),
    "l2 4": Method(l2=4.0),
    "l2 10": Method(l2=10.0),
    "AR 1": Method(staleness=1.0),
    "AR 2": Method(staleness=2.0),
    "AR 4": Method(staleness=4.0),
    "fresh": Method(fresh=True),
    "average 0.3": Method(average=0.3),
    "average 1": Method(average=1.0),
    "AR 1 average 0.3": Method(staleness=1.0, average=0.3),
    "AR 1 average 1": Method(staleness=1.0, average=1.0),
    "AR 2 average 1": Method(staleness=2.0, average=1.0),
    "fresh average 0.3": Method(fresh=True, average=0.3),
}
Samples = tuple[Tensor, Tensor, Tensor]
"""Dense features float [n, N], rows of the one table int64 [n, F], labels float [n]."""


class DeepFM(nn.Module):
    """DeepFM over one table of all fields' rows, whose last column is the wide weight."""

    def __init__(self, rows: int, fields: int, num_dense: int, hidden: list[int], std: float) -> None:
        super().__init__()
        self.std, self.table = std, nn.Parameter(torch.empty(rows, DIM + 1))
        self.begin_tables()
        layers = [nn.Linear(*pair) for pair in pairwise([fields * DIM + num_dense, *hidden])]
        self.mlp = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
        self.linear, self.output = nn.Linear(num_dense, 1), nn.Linear(hidden[-1], 1, bias=False)
        for layer in (*layers, self.linear, self.output):
            nn.init.xavier_normal_(layer.weight)
        for layer in (*layers, self.linear):
            nn.init.zeros_(layer.bias)

    def begin_tables(self) -> None:
        self.table.data[:, :DIM].normal_(std=self.std)
        self.table.data[:, DIM] = 0

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        looked_up = F.embedding(rows, self.table)
        deep, wide = looked_up[..., :DIM], looked_up[..., DIM].sum(1)
        pairs = 0.5 * (deep.sum(1).square() - deep.square().sum(1)).sum(1)
        hidden = self.mlp(torch.cat([deep.flatten(1), dense], 1))
        output: Tensor = wide + pairs + (self.linear(dense) + self.output(hidden)).squeeze(1)
        return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="prepared data set")
    parser.add_argument("--config", type=Path, required=True, help="TOML file with the base values")
    parser.add_argument("--scale", type=int, default=128, help="multiple of the base batch [128]")
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON lines")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--methods", default=",".join(METHODS), help="separated by commas")
    arguments = parser.parse_args()
    config = tomllib.loads(arguments.config.read_text())
    done = [json.loads(line) for line in arguments.output.read_text().splitlines()] if arguments.output.exists() else []
    schema = Schema.load(arguments.data)
    train_split, test_split = (read(arguments.data / split, schema) for split in ("train", "test"))
    for seed in range(arguments.seeds):
        for name in arguments.methods.split(","):
            key = {"method": name, "scale": arguments.scale, "seed": seed}
            if any(line.items() >= key.items() for line in done):
                continue
            epochs = train(METHODS[name], config, arguments.scale, arguments.epochs, seed, train_split, test_split)
            line = {**key, **dataclasses.asdict(METHODS[name]), **environment(torch.device("cpu")), "epochs": epochs}
            with arguments.output.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(name, seed, [f"{100 * each['auc']:.2f}" for each in epochs], flush=True)


def read(folder: Path, schema: Schema) -> Samples:
    """Reads a split; the rows of each field follow those of the fields before it."""
    table = pq.read_table(sorted(folder.glob("*.parquet")))
    fields = [field for field in schema.sparse if field.kind == "categorical"]
    starts = np.cumsum([0] + [field.num_embeddings for field in fields])
    rows = [table[field.name].to_numpy() + start for field, start in zip(fields, starts, strict=False)]
    dense = [table[field.name].to_numpy() for field in schema.dense] or [np.zeros(table.num_rows)]
    label = table["label"].to_numpy()
    return (
        torch.from_numpy(np.stack(dense, 1).astype(np.float32)),
        torch.from_numpy(np.stack(rows, 1).astype(np.int64)),
        torch.from_numpy(label.astype(np.float32)),
    )


def train(
    method: Method, config: dict[str, Any], scale: int, epochs: int, seed: int, samples: Samples, test: Samples
) -> list[dict[str, float]]:
    """Trains a network; returns AUC and logloss on the test split after each epoch."""
    given, size = config["optimizer"], config["optimizer"]["base_batch_size"]
    base = Hyperparameters(given["embedding_lr"], given["dense_lr"], given["l2"], tuple(given["betas"]), given["eps"])
    values = scale_hyperparameters(base, base_batch_size=size, batch_size=scale * size)
    torch.manual_seed(seed)
    (dense, rows, label), batch_size = samples, scale * size
    number, fields = rows.shape
    total = int(max(rows.max(), test[1].max())) + 1
    network = DeepFM(total, fields, dense.shape[1], config["model"]["hidden"], given["embedding_init_std"])
    others = [each for name, each in network.named_parameters() if name != "table"]
    tables_adam = torch.optim.Adam([network.table], values.embedding_lr, values.betas, values.eps)
    others_adam = torch.optim.Adam(others, values.dense_lr, values.betas, values.eps)
    average = [each.detach().clone() for each in network.parameters()]
    kept = math.exp(-batch_size / (method.average * number)) if method.average else 0.0
    steps, warmup = epochs * math.ceil(number / batch_size), given["warmup_epochs"] * number / batch_size
    last, results, step = torch.zeros(total), [], 0
    for epoch in range(epochs):
        if method.fresh and epoch:
            network.begin_tables()
            tables_adam = torch.optim.Adam([network.table], values.embedding_lr, values.betas, values.eps)
        for batch in torch.randperm(number).split(batch_size):
            step += 1
            if method.staleness:
                touched = rows[batch].unique()
                left_out = method.staleness * (step - last[touched]) * batch_size / number
                network.table.data[touched] *= (1 - left_out.clamp(max=1)).unsqueeze(1)
                last[touched] = step
            left = 1 - (step - 1) / steps if method.decays else 1.0
            tables_adam.param_groups[0]["lr"] = values.embedding_lr * left
            others_adam.param_groups[0]["lr"] = values.dense_lr * left * min(1.0, step / max(warmup, 1))
            tables_adam.zero_grad()
            others_adam.zero_grad()
            F.binary_cross_entropy_with_logits(network(dense[batch], rows[batch]), label[batch]).backward()
            assert network.table.grad is not None
            network.table.grad.add_(network.table.detach(), alpha=2 * method.l2 * values.l2)
            tables_adam.step()
            others_adam.step()
            for mean, parameter in zip(average, network.parameters(), strict=True):
                mean.lerp_(parameter.detach(), max(1 - kept, 1 / step))
        results.append(evaluate(network, test, average))
    return results


@torch.no_grad()
def evaluate(network: DeepFM, test: Samples, weights: list[Tensor]) -> dict[str, float]:
    """AUC and logloss with these weights in place of the network's."""
    own = [parameter.data for parameter in network.parameters()]
    for parameter, weight in zip(network.parameters(), weights, strict=True):
        parameter.data = weight
    parts = zip(test[0].split(EVALUATED), test[1].split(EVALUATED), strict=True)
    predicted = torch.cat([network(*part) for part in parts]).double().sigmoid().numpy()
    for parameter, weight in zip(network.parameters(), own, strict=True):
        parameter.data = weight
    return {"auc": roc_auc_score(test[2], predicted), "logloss": log_loss(test[2], predicted)}


if __name__ == "__main__":
    main()
