"""A model of Triton Inference Server's Python backend: predictions of the export beside this file.

docs/online.md shows the folder of the model; the server calls this class, and provides the module that it imports.
"""

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as triton

from cowrec.trainer.serving.request_samples import Rejected, RequestSample, samples_of
from cowrec.trainer.serving.service import Answer, Service


class TritonPythonModel:
    """Answers as `cowrec serve` does: the same code encodes samples, predicts, and applies published versions."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the export, and follows the publication target that the parameter `follow` names, if any."""
        follow = json.loads(args["model_config"])["parameters"].get("follow", {}).get("string_value")
        self.service = Service(Path(__file__).parent / "export", follow or None)
        self.service.load()
        if self.service.failure:
            raise self.service.failure

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Predicts the samples of all requests as one batch; an invalid sample is the error of its request alone."""
        if waiting := self.service.cannot_predict():
            return [_refusal(waiting)] * len(requests)
        read = [_read(triton.get_input_tensor_by_name(request, "SAMPLES").as_numpy()) for request in requests]
        answers = iter(self.service.compute([sample for each in read if isinstance(each, list) for sample in each]))
        return [_refusal(each) if isinstance(each, str) else _response([*islice(answers, len(each))]) for each in read]

    def finalize(self) -> None:
        """Stops following."""
        self.service.close()


def _read(texts: np.ndarray) -> list[RequestSample] | str:
    """The samples of a request, of JSON texts, [B, 1]; or what is wrong with one."""
    samples: list[RequestSample] = []
    for index, text in enumerate(texts.ravel()):
        try:
            found, _ = samples_of(text, 1)
        except Rejected as error:
            return f"SAMPLES[{index}]: {error}"
        if len(found) != 1:
            return f"SAMPLES[{index}] must be one sample, a JSON object, got {len(found)}"
        samples += found
    return samples


def _response(answers: Sequence[Answer]) -> Any:
    """The probabilities of a request's samples, float32 [B, labels], or the first one's error."""
    for index, (result, _) in enumerate(answers):
        if isinstance(result, str):
            return _refusal(f"SAMPLES[{index}]: {result}")
    rows = [[*each.values()] if isinstance(each, dict) else [each] for each, _ in answers]
    return triton.InferenceResponse([triton.Tensor("PREDICTION", np.array(rows, np.float32))])


def _refusal(message: str) -> Any:
    return triton.InferenceResponse([], triton.TritonError(message))
