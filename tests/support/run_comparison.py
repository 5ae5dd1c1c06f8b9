"""Bit-exact comparison of runs on disk, and waiting for a run's progress."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from cowrec.trainer.runtime.processes import process_group
from cowrec.trainer.sharded_model.build import gathered_table
from cowrec.trainer.training.saved_run import run_of, trained_state
from trainer_cases import checkpoint, tensors


def lines(run_dir: Path) -> int:
    """Number of lines of a run's metrics."""
    file = run_dir / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def wait_for(happened: Callable[[], object], seconds: float = 600.0) -> None:
    """Waits until a condition holds; fails after a time limit."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def assert_same(one: Path, other: Path) -> None:
    """Compares the newest checkpoints of two runs."""
    found, expected = tensors(checkpoint(one)), tensors(checkpoint(other))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def state_of(run_dir: Path, part: str = "") -> dict[str, torch.Tensor]:
    """Tensors of a run's newest checkpoint, or of a part of it, by path; without random states."""
    state = tensors(checkpoint(run_dir))
    return {key: value for key, value in state.items() if key.startswith(f"/{part}") and not key.startswith("/random")}


def up_to_date(run_dir: Path) -> dict[str, torch.Tensor]:
    """:func:`state_of` once all replayed rows, which checkpoints hold as they are, have taken the steps they missed."""
    found = state_of(run_dir)
    with process_group("cpu") as process:
        state, _ = trained_state(run_dir, run_of(run_dir), process)
        if not state.adam or not any(lookup.replays for lookup in state.adam.lookups):
            return found
        state.adam.flush()
        weights = state.model.state_dict()
        found = {key: value for key, value in found.items() if not key.startswith("/embedding_optimizer")}
        for name, entries in state.adam.state_dict()["state"].items():
            found[f"/model/{name}"] = gathered_table(weights[name], process)
            for moment in ("exp_avg", "exp_avg_sq"):
                found[f"/embedding_optimizer/{name}/{moment}"] = gathered_table(entries[moment], process)
    return found


def assert_close(
    one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], *, atol: float = 1e-6, rtol: float = 0.0
) -> None:
    """Compares tensors of equal names, integers exactly; the tolerance is that of sums in another order."""
    assert one.keys() == other.keys()
    for key, value in one.items():
        close = {"rtol": rtol, "atol": atol} if value.is_floating_point() else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(other[key], value, **close, msg=lambda text, key=key: f"{key}: {text}")


VALIDATION_PAIR = 1 / 400
"""A pair of a click and a non-click among the 41 validation samples of these runs; their reports lack the number."""


def assert_same_measures(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Compares nested measures of two runs to 1e-6, and an AUC to one pair of a click and a non-click.

    Rounding may order two samples whose logits are nearly equal in another way, and may move a sample to another bin.
    """
    first, second = _flat(one), _flat(other)
    assert first.keys() == second.keys()
    for key, value in first.items():
        tolerance, (group, _, name) = 1e-6, key.rpartition("/")
        if name == "validation_auc":
            tolerance += VALIDATION_PAIR
        elif name == "auc" and f"{group}/ctr" in first and value is not None:  # of samples of both classes
            clicks = first[f"{group}/ctr"] * first[f"{group}/rows"]
            tolerance += 1 / (clicks * (first[f"{group}/rows"] - clicks))
        assert value == pytest.approx(second[key], abs=tolerance), key


def _flat(measures: Any, path: str = "") -> dict[str, float]:
    """Numbers of nested dictionaries and lists, by path; without bins."""
    if path.endswith(("/calibration_bins", "/calibration_error")):
        return {}
    if isinstance(measures, list):
        measures = dict(enumerate(measures))
    if not isinstance(measures, dict):
        return {path: measures}
    return {
        key: number for name, measure in measures.items() for key, number in _flat(measure, f"{path}/{name}").items()
    }
