"""Capture of a training step as a CUDA graph. It has not run on a GPU yet; tests of CapturedSteps use a stand-in."""

import gc
import warnings
from collections.abc import Callable
from typing import Protocol

import torch

from .sequential_steps import Output

Step = Callable[[], Output]
_SYNCHRONIZES = "synchronizing CUDA operation"
"""Part of torch's warning under ``torch.cuda.set_sync_debug_mode``."""
_SURVIVES_FAILED_CAPTURES = (2, 13)
"""Version from which torch cleans up after a capture that failed; see pytorch's issues 176752 and 180395."""


class CaptureFailed(RuntimeError):
    """A step could not be captured. It has not been taken, and can be taken without a graph."""


class Capture(Protocol):
    """Way to record a step.

    Attributes:
        wait: why the latest warm-up step waited for the device; "" if it did not.
    """

    wait: str

    def warm_up(self, step: Step) -> Output:
        """Takes a step, as preparation of the capture."""

    def capture(self, step: Step) -> Step:
        """Records a step without taking it; returns a function that takes it and returns the same tensors each time.

        Raises:
            CaptureFailed: the step cannot be recorded.
        """


class CudaGraphCapture:
    """Records steps as CUDA graphs, after warm-up steps on the same stream, as torch demands.

    A step that waits for the device cannot be captured. Such steps are recognised in the warm-up, because a failed
    capture leaves earlier versions of torch in a state in which training cannot go on.
    """

    def __init__(self) -> None:
        self.wait = ""
        self._stream = torch.cuda.Stream()

    def warm_up(self, step: Step) -> Output:
        current, mode = torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()
        self._stream.wait_stream(current)
        with warnings.catch_warnings(record=True) as caught, torch.cuda.stream(self._stream):
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                output = step()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        current.wait_stream(self._stream)
        self.wait = ""
        for each in caught:
            if _SYNCHRONIZES in str(each.message):
                self.wait = f"it waits for the device ({each.filename}:{each.lineno})"
            else:
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        return output

    def capture(self, step: Step) -> Step:
        """Records a step as in :class:`Capture`.

        Raises:
            CaptureFailed: as there.
            ValueError: the capture has failed in a version of torch that cannot go on.
        """
        gc.collect()  # what is left of earlier steps' backward passes would bring their streams into the capture
        graph, stream, cause = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), None
        try:
            # Not "global": the reader's thread may allocate page-locked memory meanwhile.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                try:
                    output = step()
                except Exception as error:
                    cause = error  # the end of the capture raises an error of its own
                    raise
        except Exception as error:
            torch.cuda.set_stream(stream)  # a failed capture leaves its own
            why = str(cause or error).strip().partition("\n")[0] or type(cause or error).__name__
            version = tuple(int(part) for part in torch.__version__.split(".")[:2])
            if version < _SURVIVES_FAILED_CAPTURES and not isinstance(cause, torch.cuda.OutOfMemoryError):
                raise ValueError(
                    f"the training step cannot be captured as a CUDA graph: {why}; set train.cuda_graph = false (and"
                    " continue with --resume)"
                ) from (cause or error)
            raise CaptureFailed(why) from (cause or error)

        def replay() -> Output:
            graph.replay()
            return output

        return replay
