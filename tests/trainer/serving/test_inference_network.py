"""Inference of a network equals the network as it is trained, for few samples and many, with old and new weights."""

import psutil
import pytest
import torch
from torch import Tensor, nn

from cowrec.models import MODELS, ModelConfig, build_network, physical_dim
from cowrec.trainer.serving.inference_network import InferenceNetwork

FIELDS, DENSE, DIM = ["a", "b", "c"], 2, 8
SIZES = (DENSE, len(FIELDS), physical_dim(DIM))


@pytest.mark.parametrize("name", MODELS)
def test_inference_equals_the_network_of_training(name: str) -> None:
    """float32 sums in another order: 1e-6 is about ten units in the last place of a probability."""
    config = ModelConfig(name=name, embedding_dim=DIM, hidden=(16, 16))
    first, second = (build_network(config, FIELDS, DENSE, 2 if name in ("mmoe", "ple", "shared_bottom") else 1).eval()
                     for _ in range(2))  # fmt: skip
    inference = InferenceNetwork(first, 0.5, SIZES)
    assert inference.replays
    renewed = inference.with_weights(second.state_dict())
    again = renewed.with_weights(first.state_dict())
    for samples in (1, 7, 32, 33):
        dense, rows = torch.randn(samples, DENSE), 0.3 * torch.randn(samples, *SIZES[1:])
        for network, served in ((first, inference), (second, renewed), (first, again)):
            expected = (network(dense, rows) + 0.5).sigmoid().detach()
            torch.testing.assert_close(served(dense, rows), expected, atol=1e-6, rtol=0)
            with torch.autocast("cpu"):
                torch.testing.assert_close(served(dense, rows).float(), expected, atol=0.05, rtol=0)


class Branching(nn.Module):
    """Its operations depend on the number of samples."""

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        return dense.sum(1) if len(dense) == 1 else rows.sum((1, 2))


def test_a_network_whose_operations_change_is_not_replayed() -> None:
    inference = InferenceNetwork(Branching(), 0.0, SIZES)
    dense, rows = torch.randn(5, DENSE), torch.randn(5, *SIZES[1:])
    assert not inference.replays
    torch.testing.assert_close(inference(dense, rows), rows.sum((1, 2)).sigmoid())
    torch.testing.assert_close(inference(dense[:1], rows[:1]), dense[:1].sum(1).sigmoid())


class Scaling(nn.Module):
    """Reads a weight as a number, which a recording would take for a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        return rows.sum((1, 2)) * self.scale.item()


def test_a_network_that_reads_its_weights_as_numbers_is_not_replayed() -> None:
    inference = InferenceNetwork(Scaling(), 0.0, SIZES)
    rows = torch.randn(5, *SIZES[1:])
    assert not inference.replays
    found = inference.with_weights({"scale": torch.tensor(3.0)})(torch.randn(5, DENSE), rows)
    torch.testing.assert_close(found, (3 * rows.sum((1, 2))).sigmoid())


def test_versions_take_no_memory_once_they_are_replaced() -> None:
    """200 versions of weights of 0.5 MiB each; the first ones fill the allocator's caches."""
    config = ModelConfig(name="deepfm", embedding_dim=DIM, hidden=(256, 256))
    network = build_network(config, FIELDS, DENSE).eval()
    inference, weights = InferenceNetwork(network, 0.0, SIZES), network.state_dict()
    dense, rows = torch.randn(1, DENSE), torch.randn(1, *SIZES[1:])
    assert inference.replays

    def replace(times: int) -> int:
        for _ in range(times):
            inference.with_weights(weights)(dense, rows)
        return psutil.Process().memory_info().rss

    before = replace(60)
    assert replace(140) - before < 30 << 20
