"""Networks of several tasks: those of one task are refused; networks and losses of one's own."""

import sys
from pathlib import Path

import pytest
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from cowrec.models import ModelConfig, build_model, build_network, loss_of, physical_dim


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
