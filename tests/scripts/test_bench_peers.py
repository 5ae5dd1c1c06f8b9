"""`scripts/bench_peers.py`: its lines and table, failing peers, and CowClip in plain PyTorch against a loop."""

import numpy as np
import torch


def test_the_clip_of_plain_pytorch_equals_cowclip():
    """Compares with a loop in float64; float32 rounds norms and their ratio to a few units in 1e7."""
    from scripts.peers import torch_dense_adam_cowclip as peer

    random = np.random.default_rng(0)
    weights, gradients = random.normal(size=(7, 10)), random.normal(size=(7, 10))
    weights[1] = 0.0  # limited by the floor
    gradients[2] = 0.0  # stays zero
    gradients[3] *= 1e-3  # not clipped
    ids = np.array([0, 0, 0, 1, 2, 3])  # the other rows are absent and count once
    table = torch.nn.Parameter(torch.tensor(weights, dtype=torch.float32))
    table.grad = torch.tensor(gradients, dtype=torch.float32)
    peer.clip(table, torch.from_numpy(ids))
    for row in range(7):
        count = max((ids == row).sum(), 1)
        limit = peer.R * count * max(np.linalg.norm(weights[row]), peer.R * np.sqrt(10) * peer.BOUND)
        norm = np.linalg.norm(gradients[row])
        expected = gradients[row] * min(1, limit / norm if norm else 1)
        np.testing.assert_allclose(table.grad[row].numpy(), expected, rtol=1e-5, atol=0)
