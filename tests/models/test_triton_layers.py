"""The CUDA kernels of the networks, in Triton's interpreter: values and gradients against plain torch in float64."""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_numba_layers import SHAPES, TOLERANCE, check_close, compare_features
from torch import Tensor

from cowrec.models import front, linear_relu

pytest.importorskip("triton", reason="Triton is not installed")

NETWORKS = ("wdl", "deepfm", "dcnv2", "mmoe")
"""Those that use the kernels most differently."""


def test_interpreted() -> None:
    """Runs in a subprocess, because Triton reads TRITON_INTERPRET when it is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = [sys.executable, __file__]
    done = subprocess.run(script, env=environment, check=False, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["equal"] * (2 * len(SHAPES) + 4 + len(NETWORKS))


def compare_layers(dtype: torch.dtype, of_logits: bool) -> None:
    """Layers on inputs with zeros after them; what is not a ReLU's positive side has no gradient."""
    for samples in (0, 1, 70):
        generator = torch.Generator().manual_seed(samples)
        shapes = ((samples, 13), (70, 13), (70,), (5, 70), (5,), (5, 1))
        *tensors, kernel = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        grad = torch.randn(samples, *(() if of_logits else (5,)), generator=generator).to(dtype)

        def plain(x: Tensor, first: Tensor, bias: Tensor, second: Tensor, shift: Tensor, kernel: Tensor) -> Tensor:
            x = F.linear(F.linear(x, first, bias).relu(), second, shift).relu()
            return (x @ kernel).squeeze(1) if of_logits else x

        def fused(x: Tensor, *parameters: Tensor) -> Tensor:
            *layers, kernel = parameters
            padded = F.pad(x.detach(), (0, 3))
            if of_logits:
                return linear_relu.logits_of_layers(x, kernel, *layers, padded=padded)
            return linear_relu.linear_relu(x, *layers, padded=padded)

        results = []
        for compute, precise in ((fused, dtype), (plain, torch.float64)):
            leaves = [tensor.to(precise, copy=True).requires_grad_() for tensor in (*tensors, kernel)]
            y = compute(*leaves)
            y.backward(grad.to(y.dtype))
            results.append([y.detach(), *(leaf.grad for leaf in leaves[: 6 if of_logits else 5])])
        check_close(*results, 5 * TOLERANCE[dtype])


def compare_network(name: str) -> None:
    """A network's logits and gradients with the kernels are those without."""
    from test_models import random_batch, small_model

    results = []
    for kernels in (True, False):
        linear_relu.uses_kernels = front.uses_kernels = lambda _, kernels=kernels: kernels
        model, (dense, sparse) = small_model(name), random_batch(9, ids_per_bag=None)
        logits = model(dense, sparse)
        logits.square().sum().backward()
        grads = (
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in model.parameters()
        )
        results.append([logits.detach(), *grads])
    check_close(*results, 1e-4)


if __name__ == "__main__":
    from cowrec.models import triton_layers

    triton_layers._MOST_SPLITS = 2  # so that programs take several tiles of small batches
    linear_relu.uses_kernels = front.uses_kernels = lambda _: True
    sys.path.insert(0, str(Path(__file__).parent / "networks"))
    for case in product(SHAPES, TOLERANCE):
        compare_features(*case)
        print("equal")
    for case in product(TOLERANCE, (False, True)):
        compare_layers(*case)
        print("equal")
    for name in NETWORKS:
        compare_network(name)
        print("equal")
