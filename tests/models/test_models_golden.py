"""The networks reproduce the recordings of the reference implementation."""

from pathlib import Path

import numpy as np
import pytest
import torch

from cowrec.models import l2_kernels
from golden_models import golden_batch, golden_model, model_name, table_views

# float32: sums of up to 22 terms in another order (seen: 1.8e-7). float64: TorchRec's collection returns float32
# whatever its tables are, which rounds the embeddings (seen: 4.3e-10).
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-9}


@pytest.fixture(scope="module")
def recordings(golden_dir: Path) -> dict[Path, dict[str, np.ndarray]]:
    files = {file: dict(np.load(file)) for file in sorted(golden_dir.glob("traj_*.npz"))}
    assert files, f"no traj_*.npz in {golden_dir}"
    return files


@pytest.mark.parametrize(("state", "step"), [("s0", 0), ("s1", 1)])
def test_predictions(recordings: dict[Path, dict[str, np.ndarray]], state: str, step: int) -> None:
    for file, golden in recordings.items():
        model = golden_model(model_name(file), golden, state)
        dense, sparse, _ = golden_batch(golden, step)
        expected = torch.from_numpy(golden[f"{state}/pred"]).squeeze(1)
        predicted = torch.sigmoid(model(dense.to(expected.dtype), sparse))
        error = (predicted - expected).abs().max().item()
        assert error <= TOLERANCE[expected.dtype], f"{file.name}: {error}"


def test_regularised_tensors(recordings: dict[Path, dict[str, np.ndarray]]) -> None:
    """The recorded regularisation is l2 over tables and linear kernel plus l2_cross over cross kernels, in float32."""
    for file, golden in recordings.items():
        model = golden_model(model_name(file), golden)
        kernels = l2_kernels(model)
        strong = sum(w.square().sum().item() for w in (*table_views(model).values(), *kernels["linear"]))
        weak = sum(w.square().sum().item() for w in kernels["cross"])
        total = golden["hp/l2"] * strong + golden["hp/l2_cross"] * weak
        assert total == pytest.approx(golden["reg_loss"][0], rel=1e-6), file.name
