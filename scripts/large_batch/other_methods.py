"""Methods of the literature beside `half_life`, in plain PyTorch with dense Adam, at one large batch size.

    python scripts/large_batch/other_methods.py --data DATA/synthetic --config TUNED.toml --scale 128 -o FILE.jsonl

Each run appends a line; a run that has one is not repeated. Fields must have one id a sample. Base values are those of
the TOML file, scaled by `half_life`; there is no clip.
"""

import argparse
import dataclasses
import json
import math
import tomllib
from collections.abc import Callable
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

DIM, EVALUATED = 10, 16384


@dataclasses.dataclass(frozen=True)
class Method:
    """What differs from dense Adam with L2 at the values of `half_life`.

    Attributes:
        occupancy: exponent of h, the number of base batches of a step that a row was in, which replaces k in the rate
            of the rows of the batch: h = s (1 - (1 - 1/s)^cnt).
        decay: share by which each row shrinks in an epoch, as an exponent, in place of L2: what a decay at each
            occurrence in inverse proportion to the id's frequency amounts to (AdamAR, arXiv 2511.06374).
        perturbation: radius of Helen's perturbation of the rows (arXiv 2403.00798), before the gradient is computed.
        muon: whether torch's Muon updates the kernels of the MLP, at Adam's rate.
        average: memory in epochs of the moving average of the weights that is evaluated.
        beta1: of the tables' Adam; None is that of `half_life`.
    """

    occupancy: float | None = None
    decay: float | None = None
    perturbation: float = 0.0
    muon: bool = False
    average: float = 0.0
    beta1: float | None = None


METHODS = {
    "half_life": Method(),
    "occupancy 0.5": Method(occupancy=0.5),
    "occupancy 0.75": Method(occupancy=0.75),
    "decay 1": Method(decay=1.0),
    "Helen 0.01": Method(perturbation=0.01),
    "Muon": Method(muon=True),
    "beta1 0": Method(beta1=0.0),
    "average 0.1": Method(average=0.1),
}


@dataclasses.dataclass(frozen=True)
class Samples:
    """Dense features float [n, N], rows of the one table int64 [n, F], labels float [n]."""

    dense: Tensor
    rows: Tensor
    label: Tensor


class DeepFM(nn.Module):
    """DeepFM over one table of all fields' rows, whose last column is the wide weight."""

    def __init__(self, rows: int, fields: int, num_dense: int, hidden: list[int], std: float) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.cat([torch.randn(rows, DIM) * std, torch.zeros(rows, 1)], 1))
        widths = [fields * DIM + num_dense, *hidden]
        layers = [nn.Linear(*pair) for pair in pairwise(widths)]
        self.mlp = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
        self.linear, self.output = nn.Linear(num_dense, 1), nn.Linear(hidden[-1], 1, bias=False)
        for layer in (*layers, self.linear, self.output):
            nn.init.xavier_normal_(layer.weight)
        for layer in (*layers, self.linear):
            nn.init.zeros_(layer.bias)

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        looked_up = F.embedding(rows, self.table)
        deep, wide = looked_up[..., :DIM], looked_up[..., DIM].sum(1)
        pairs = 0.5 * (deep.sum(1).square() - deep.square().sum(1)).sum(1)
        hidden = self.mlp(torch.cat([deep.flatten(1), dense], 1))
        return wide + pairs + (self.linear(dense) + self.output(hidden)).squeeze(1)


class Adam:
    """torch's Adam for one tensor, on its gradient, with a rate for each row."""

    def __init__(self, tensor: Tensor, beta1: float, beta2: float, eps: float) -> None:
        self.tensor, self.betas, self.eps, self.steps = tensor, (beta1, beta2), eps, 0
        self.first, self.second = torch.zeros_like(tensor), torch.zeros_like(tensor)

    def step(self, grad: Tensor, rate: float | Tensor) -> None:
        (beta1, beta2), self.steps = self.betas, self.steps + 1
        self.first.lerp_(grad, 1 - beta1)
        self.second.lerp_(grad.square(), 1 - beta2)
        corrected = (self.second / (1 - beta2**self.steps)).sqrt_().add_(self.eps)
        self.tensor.sub_(self.first.div(corrected).mul_(rate).div_(1 - beta1**self.steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="prepared data set")
    parser.add_argument("--config", type=Path, required=True, help="TOML file with the base values")
    parser.add_argument("--scale", type=int, required=True, help="multiple of the base batch")
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON lines")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", default=",".join(METHODS), help="separated by commas")
    arguments = parser.parse_args()
    config = tomllib.loads(arguments.config.read_text())
    schema, done = Schema.load(arguments.data), []
    if arguments.output.exists():
        done = [json.loads(line) for line in arguments.output.read_text().splitlines()]
    train_split, test_split = (read(arguments.data / split, schema) for split in ("train", "test"))
    for seed in range(arguments.seeds):
        for name in arguments.methods.split(","):
            key = {"method": name, "scale": arguments.scale, "seed": seed}
            if any(line.items() >= key.items() for line in done):
                continue
            epochs = train(METHODS[name], config, arguments.scale, arguments.epochs, seed, train_split, test_split)
            line = {**key, **dataclasses.asdict(METHODS[name]), "torch": torch.__version__, "epochs": epochs}
            with arguments.output.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(name, seed, [f"{100 * each['auc']:.2f}" for each in epochs], flush=True)


def read(folder: Path, schema: Schema) -> Samples:
    """Reads a split; the rows of each field follow those of the fields before it."""
    table = pq.read_table(sorted(folder.glob("*.parquet")))
    starts = np.cumsum([0] + [field.num_embeddings for field in schema.sparse])
    rows = [table[field.name].to_numpy() + start for field, start in zip(schema.sparse, starts, strict=False)]
    dense = [table[field.name].to_numpy() for field in schema.dense]
    return Samples(
        torch.from_numpy(np.stack(dense, 1).astype(np.float32)),
        torch.from_numpy(np.stack(rows, 1).astype(np.int64)),
        torch.from_numpy(table["label"].to_numpy().astype(np.float32)),
    )


def train(
    method: Method, config: dict[str, Any], scale: int, epochs: int, seed: int, samples: Samples, test: Samples
) -> list[dict[str, float]]:
    """Trains a network; returns AUC and logloss on the test split after each epoch."""
    settings, size = config["optimizer"], config["optimizer"]["base_batch_size"]
    base = Hyperparameters(
        settings["embedding_lr"], settings["dense_lr"], settings["l2"], tuple(settings["betas"]), settings["eps"]
    )
    values = scale_hyperparameters(base, base_batch_size=size, batch_size=scale * size)
    torch.manual_seed(seed)
    number, fields = samples.rows.shape
    counts = torch.bincount(samples.rows.flatten()).float()
    rows = int(max(samples.rows.max(), test.rows.max())) + 1
    counts = F.pad(counts, (0, rows - len(counts)))
    network = DeepFM(rows, fields, samples.dense.shape[1], config["model"]["hidden"], settings["embedding_init_std"])
    update = _update(method, network, values, base, scale, counts, scale * size / number)
    average = [parameter.detach().clone() for parameter in network.parameters()]
    warmup, results, step = settings["warmup_epochs"] * number / (scale * size), [], 0
    for _ in range(epochs):
        for batch in torch.randperm(number).split(scale * size):
            step += 1
            update(samples.dense[batch], samples.rows[batch], samples.label[batch], min(1.0, step / max(warmup, 1)))
            if method.average:
                kept = math.exp(-scale * size / (method.average * number))
                for mean, parameter in zip(average, network.parameters(), strict=True):
                    mean.lerp_(parameter.detach(), max(1 - kept, 1 / step))
        results.append(evaluate(network, test, average if method.average else None))
    return results


def _update(
    method: Method,
    network: DeepFM,
    values: Hyperparameters,
    base: Hyperparameters,
    s: int,
    counts: Tensor,
    share: float,
) -> Callable[[Tensor, Tensor, Tensor, float], None]:
    """The update of a step; ``share`` is that of the batch in the training samples."""
    beta1, beta2 = values.betas
    table = Adam(network.table.data, beta1 if method.beta1 is None else method.beta1, beta2, values.eps)
    kernels = [layer.weight for layer in network.mlp if isinstance(layer, nn.Linear)] if method.muon else []
    muon = torch.optim.Muon(kernels, values.dense_lr, 0.0, adjust_lr_fn="match_rms_adamw") if kernels else None
    others = [
        each for each in network.parameters() if each is not network.table and all(each is not k for k in kernels)
    ]
    adams = [Adam(each.data, beta1, beta2, values.eps) for each in others]

    def gradients(dense: Tensor, rows: Tensor, label: Tensor) -> tuple[Tensor, ...]:
        loss = F.binary_cross_entropy_with_logits(network(dense, rows), label)
        return torch.autograd.grad(loss, [network.table, *kernels, *others])

    def update(dense: Tensor, rows: Tensor, label: Tensor, warmed_up: float) -> None:
        grads = gradients(dense, rows, label)
        if method.perturbation:
            kept = network.table.detach().clone()
            norms = grads[0].norm(dim=1, keepdim=True).clamp(min=1e-30)
            radius = method.perturbation * (counts / counts.max()).clamp(min=0.3).unsqueeze(1)
            network.table.data += radius * grads[0] / norms
            grads = gradients(dense, rows, label)
            network.table.data.copy_(kept)
        grad, rate = grads[0], torch.full((len(counts), 1), values.embedding_lr)
        if method.decay is None:
            grad = grad + 2 * values.l2 * network.table.detach()
        else:
            network.table.data *= math.exp(-method.decay * share)
        if method.occupancy is not None:
            row, cnt = rows.unique(return_counts=True)
            rate[row, 0] = base.embedding_lr * (s * (1 - (1 - 1 / s) ** cnt)) ** method.occupancy
        table.step(grad, rate)
        for adam, gradient in zip(adams, grads[1 + len(kernels) :], strict=True):
            adam.step(gradient, warmed_up * values.dense_lr)
        if muon:
            for kernel, gradient in zip(kernels, grads[1:], strict=False):
                kernel.grad = gradient
            muon.param_groups[0]["lr"] = warmed_up * values.dense_lr
            muon.step()

    return update


@torch.no_grad()
def evaluate(network: DeepFM, test: Samples, weights: list[Tensor] | None) -> dict[str, float]:
    """AUC and logloss with the network's weights, or with the given ones in their place."""
    parameters = [parameter.data for parameter in network.parameters()]
    for parameter, weight in zip(network.parameters(), weights or parameters, strict=True):
        parameter.data = weight
    parts = zip(test.dense.split(EVALUATED), test.rows.split(EVALUATED), strict=True)
    predicted = torch.cat([network(*part) for part in parts]).double().sigmoid().numpy()
    for parameter, weight in zip(network.parameters(), parameters, strict=True):
        parameter.data = weight
    return {"auc": roc_auc_score(test.label, predicted), "logloss": log_loss(test.label, predicted)}


if __name__ == "__main__":
    main()
