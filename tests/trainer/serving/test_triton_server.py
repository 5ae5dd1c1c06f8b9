"""The recipe for Triton Inference Server: the model's folder as documented, and its `execute` against `predict`."""

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from commands.command_line import exit_code
from trained_runs import make_folder, predicted, run
from trainer_cases import COLUMNS, TEST_ROWS, TRAIN_ROWS

ROOT = Path(__file__).resolve().parents[3]
RECIPE = re.compile(r"## In Triton Inference Server\n\n((?:    .*\n)+)")


def tensor(name: str, array: np.ndarray) -> SimpleNamespace:
    """As of the server's module: a name and an array."""
    return SimpleNamespace(name=lambda: name, as_numpy=lambda: array)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The model, loaded as the server loads it from the folder that the page's commands make."""
    run(make_folder(tmp_path), tmp_path / "runs" / "clicks", "train.epochs=1")
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    monkeypatch.chdir(tmp_path)
    (recipe,) = RECIPE.findall((ROOT / "docs" / "online.md").read_text(encoding="utf-8"))
    for command in map(str.strip, recipe.splitlines()):
        if command.startswith("cowrec "):
            assert exit_code(monkeypatch, *command.split()[1:]) == 0
        elif not command.startswith("docker "):
            subprocess.run(command, shell=True, check=True)
    assert {path.name for path in (tmp_path / "models" / "clicks").iterdir()} == {"config.pbtxt", "1"}
    server = ModuleType("triton_python_backend_utils")
    server.Tensor, server.TritonError = tensor, str
    server.InferenceResponse = lambda output_tensors, error=None: SimpleNamespace(tensors=output_tensors, error=error)
    server.get_input_tensor_by_name = lambda request, name: request[name]
    monkeypatch.setitem(sys.modules, server.__name__, server)
    model = runpy.run_path("models/clicks/1/model.py")["TritonPythonModel"]()
    model.initialize({"model_config": json.dumps({"parameters": {"follow": {"string_value": ""}}})})
    yield model
    model.finalize()


def request(*samples: Any) -> dict[str, SimpleNamespace]:
    texts = [sample if isinstance(sample, bytes) else json.dumps(sample).encode() for sample in samples]
    return {"SAMPLES": tensor("SAMPLES", np.array(texts, object).reshape(-1, 1))}


def test_the_backend_predicts_as_predict_does(model: Any, tmp_path: Path) -> None:
    """Up to the order of sums; requests of several sizes, and some that are refused alone."""
    rows = (tmp_path / "raw.csv").read_text().splitlines()[1 + TRAIN_ROWS :]
    samples = [dict(zip(COLUMNS, row.split(",")[1:], strict=True)) for row in rows]
    samples = [sample | {"price": float(sample["price"])} for sample in samples]
    expected = predicted(tmp_path / "runs" / "clicks", tmp_path / "data")
    assert len(samples) == len(expected) == TEST_ROWS
    wrong = [request(b"{"), request([]), request(samples[0], samples[1] | {"price": "much"}), request({})]
    first, *refused, second = model.execute([request(samples[0]), *wrong, request(*samples[1:])])
    outputs = [response.tensors[0].as_numpy() for response in (first, second)]
    assert [output.shape for output in outputs] == [(1, 1), (TEST_ROWS - 1, 1)]
    assert {output.dtype for output in outputs} == {np.dtype("float32")}
    np.testing.assert_allclose(np.concatenate(outputs)[:, 0], expected, rtol=2e-5, atol=2e-6)
    messages = ("SAMPLES[0]: the body is not JSON", "SAMPLES[0] must be one", "SAMPLES[1]: ", "SAMPLES[0]: columns ")
    for response, message in zip(refused, messages, strict=True):
        assert response.error.startswith(message)
    assert "price" in refused[2].error
