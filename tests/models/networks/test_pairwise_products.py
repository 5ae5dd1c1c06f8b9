"""The pairwise products of DeepFM against a loop over pairs."""

import torch

from cowrec.models.networks.deepfm import PairwiseProducts


def test_pairwise_products_are_the_sum_over_pairs():
    """Values and gradients equal a loop over all pairs in float64, up to rounding."""
    rows = torch.randn(5, 4, 8, dtype=torch.float64, requires_grad=True)
    pairs = [(rows[:, i, :3] * rows[:, j, :3]).sum(1) for i in range(4) for j in range(i)]
    expected = torch.stack(pairs).sum(0)
    weights = torch.arange(1.0, 6, dtype=torch.float64)
    (wanted,) = torch.autograd.grad(expected @ weights, rows)
    found = PairwiseProducts(3)(rows)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(found @ weights, rows)[0], wanted, rtol=1e-12, atol=1e-12)
