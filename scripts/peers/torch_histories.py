"""BST (arXiv 1905.06874) and HSTU (arXiv 2402.17152) in plain PyTorch, trained by its Adam with dense gradients.

The formulas are those of `cowrec.models`: see its networks of histories. There is neither L2 nor a clip. B samples, L
ids of the longest history, D embedding width.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .histories import LABEL, Samples, work


class Bst(nn.Module):
    """A transformer's layer over the history and the item: [B, L + 1, D] -> [B, (L + 1) * D]."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.outputs = (length + 1) * width
        self.positions = nn.Parameter(torch.empty(length + 1, width))
        nn.init.xavier_normal_(self.positions)
        self.attention = nn.MultiheadAttention(width, 2, bias=False, batch_first=True)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.positions
        x = self.norms[0](x + self.attention(x, x, x, key_padding_mask=~mask, need_weights=False)[0])
        x = self.norms[1](x + self.outer(F.leaky_relu(self.inner(x))))
        return (x * mask[:, :, None]).flatten(1)


class HstuLayer(nn.Module):
    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(width, width)
        nn.init.normal_(self.inner.weight, std=0.02)
        nn.init.xavier_normal_(self.outer.weight)
        for layer in (self.inner, self.outer):
            nn.init.zeros_(layer.bias)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.bias = nn.Parameter(torch.zeros(length + 1))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        u, v, q, k = F.silu(self.inner(self.norms[0](x))).chunk(4, -1)
        v, q, k = (part.view(batch, length, 2, width // 2).transpose(1, 2) for part in (v, q, k))
        order = torch.arange(length)
        distance = order[:, None] - order
        weights = F.silu(q @ k.mT + self.bias[distance.clamp(min=0)]) / length
        weights = weights * (mask[:, None, None] & (distance >= 0))
        y: Tensor = x + self.outer(self.norms[1]((weights @ v).transpose(1, 2).flatten(2)) * u)
        return y


class Hstu(nn.Module):
    """Two layers over the history and the item: [B, L + 1, D] -> the item's output, [B, D]."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.outputs = width
        self.layers = nn.ModuleList([HstuLayer(width, length), HstuLayer(width, length)])

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x[:, -1]


class Model(nn.Module):
    def __init__(self, fields: list[dict[str, Any]], job: dict[str, Any]) -> None:
        super().__init__()
        width = job["embedding_dim"]
        self.item, self.history = job["item"], job["history"]
        length = next(field["max_length"] for field in fields if field["name"] == self.history)
        single = [field for field in fields if field["name"] != self.history]
        tables = {field["name"]: nn.Embedding(field["num_embeddings"] + 1, width, padding_idx=0) for field in single}
        for table in tables.values():
            nn.init.normal_(table.weight, std=1e-4)
        self.tables = nn.ModuleDict(tables)
        self.interest = {"bst": Bst, "hstu": Hstu}[job["network"]](width, length)
        # BST's outputs have the scored item, which is among the fields too.
        sizes = [len(single) * width + self.interest.outputs, *job["hidden"]]
        layers = [(nn.Linear(inputs, outputs), nn.ReLU()) for inputs, outputs in itertools.pairwise(sizes)]
        self.mlp = nn.Sequential(*itertools.chain.from_iterable(layers), nn.Linear(sizes[-1], 1))

    def forward(self, samples: Samples) -> Tensor:
        rows = [table(samples[name]) for name, table in self.tables.items()]
        ids, item = samples[self.history], samples[self.item]
        x = self.tables[self.item](torch.cat([ids, item[:, None]], 1))
        interest = self.interest(x, F.pad(ids != 0, (0, 1), value=True))
        logits: Tensor = self.mlp(torch.cat([*rows, interest], 1)).squeeze(1)
        return logits


def build(fields: list[dict[str, Any]], job: dict[str, Any]) -> tuple[nn.Module, Callable[[Samples], Any]]:
    model = Model(fields, job)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(samples: Samples) -> None:
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(model(samples), samples[LABEL]).backward()
        optimizer.step()

    return model, step


if __name__ == "__main__":
    work(build, lambda model, samples: model(samples), ["torch"])
