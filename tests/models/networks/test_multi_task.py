"""Networks of several tasks: logits and gradients against plain loops; networks of one task are refused."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.models import ModelConfig, build_model, build_network, loss_of, physical_dim

sys.path.append(str(Path(__file__).parents[1] / "networks"))
from network_formulas import FORMULAS

DIM, ROWS = 3, (11, 5)
OPTIONS: dict[str, dict[str, Any]] = {
    "shared_bottom": {"tower": [4, 2]},
    "mmoe": {"experts": 3, "tower": [4]},
    "ple": {"levels": 2, "task_experts": 2, "shared_experts": 1, "tower": [4]},
}


def tables() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name=f"t{i}", feature_names=[f"C{i}"], num_embeddings=rows, embedding_dim=physical_dim(DIM))
        for i, rows in enumerate(ROWS)
    ]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("tasks", [2, 3])
def test_logits_and_gradients_are_the_formula_s(name: str, tasks: int) -> None:
    """Float32 sums of about ten terms of size 1."""
    torch.manual_seed(1)
    config = ModelConfig(name=name, embedding_dim=DIM, hidden=(6, 5), options=OPTIONS[name])
    model = build_model(config, tables(), 2, num_tasks=tasks)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    ids = [torch.randint(rows, (7,)) for rows in ROWS]
    sparse = KeyedJaggedTensor(["C0", "C1"], torch.cat(ids), lengths=torch.ones(14, dtype=torch.int64))
    dense = torch.rand(7, 2)
    logits = model(dense, sparse)
    bags = model.front.embeddings.embedding_bags
    rows = torch.stack([bags[f"t{i}"].weight[each] for i, each in enumerate(ids)], dim=1)
    expected = torch.stack(
        [FORMULAS[name](model, e[:, :DIM], d, e[:, DIM].sum()) for e, d in zip(rows, dense, strict=True)]
    )
    assert logits.shape == (7, tasks)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    direction = torch.randn(7, tasks)
    parameters = dict(model.named_parameters())
    got = torch.autograd.grad((logits * direction).sum(), list(parameters.values()))
    want = torch.autograd.grad((expected * direction).sum(), list(parameters.values()))
    for key, mine, plain in zip(parameters, got, want, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


def test_a_network_of_one_task_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r'"deepfm" computes one logit, but the data have 2 labels; .*shared_bottom, mm'
    ):
        build_network(ModelConfig(name="deepfm"), ["a", "b"], 2, num_tasks=2)
    with pytest.raises(ValueError, match="has no option num_tasks"):
        build_network(ModelConfig(name="mmoe", options={"num_tasks": 3}), ["a", "b"], 2)


OWN = """
from torch import nn
class Net(nn.Module):
    def __init__(self, config, front, num_tasks):
        super().__init__()
        self.front, self.out = front, nn.Linear(front.width, num_tasks)
    def forward(self, dense, sparse):
        return self.out(self.front(dense, sparse).flat)
class One(Net):
    def forward(self, dense, sparse):
        return super().forward(dense, sparse).sum(1)
def mean(logits, label):
    return (logits - label).square().mean(1)
"""


def test_networks_and_losses_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_tasks.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    build_model(ModelConfig(name="my_tasks:Net"), tables_of_width(10), 2, num_tasks=3)
    with pytest.raises(
        ValueError, match=r"returned \[3\].* instead of one logit for each sample and task, float32 \[3, 2\]"
    ):
        build_model(ModelConfig(name="my_tasks:One"), tables_of_width(10), 2, num_tasks=2)
    with pytest.raises(
        ValueError, match=r"returned \[3, 1\] .*instead of one logit for each sample, float32 \[3\]; .*squeeze"
    ):
        build_model(ModelConfig(name="my_tasks:Net"), tables_of_width(10), 2)
    with pytest.raises(ValueError, match=r"returned \[3\] for logits and labels of shape \[3, 2\]"):
        loss_of("my_tasks:mean", {}, tasks=2)
    del sys.modules["my_tasks"]


def tables_of_width(dim: int) -> list[EmbeddingBagConfig]:
    return [EmbeddingBagConfig(name="t", feature_names=["C"], num_embeddings=5, embedding_dim=physical_dim(dim))]
