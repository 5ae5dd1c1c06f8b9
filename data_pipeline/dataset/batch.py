"""The mini-batch: input of the model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable


@dataclass
class Batch(Pipelineable):
    """B samples of one rank, a slice of a global batch.

    Attributes:
        dense: float32 [B, N], N may be 0.
        sparse: ids of all sparse fields, keys in schema order, int32 values (int64 if a field has raw ids), int32
            lengths and offsets, stride B. Has float32 weights if, and only if, the schema has a weighted field.
        label: float32 [B], or [B, T] for T > 1 tasks; 0 or 1, a rate between, NaN where unknown.
        global_batch_size: samples over all ranks; B by default.
        time: int64 [B], Unix seconds; None if the data set has no time column.
        true_logit: float32 [B], logits of the true click probabilities; None if the reader reads none.
        weight: of samples, float32 [B], at least 0; None if the data set has none.
        share: share of the samples of a training step; below 1 where a step takes several batches.
    """

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    label: torch.Tensor
    global_batch_size: int = -1
    time: torch.Tensor | None = None
    true_logit: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    share: float = 1.0

    def __post_init__(self) -> None:
        if self.global_batch_size < 0:
            self.global_batch_size = len(self.label)

    @property
    def _optional(self) -> tuple[torch.Tensor | None, ...]:
        """The columns that not all data sets have, in the order of the attributes."""
        return self.time, self.true_logit, self.weight

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Copies the batch to `device`; shares tensors that are there already."""
        return self._with_each(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """Copies the batch to page-locked memory, from which `to(cuda, non_blocking=True)` is asynchronous."""
        return self._with_each(lambda part: part.pin_memory())

    def _with_each(self, change: Callable[[Any], Any]) -> "Batch":
        optional = (None if column is None else change(column) for column in self._optional)
        parts = change(self.dense), change(self.sparse), change(self.label)
        return Batch(*parts, self.global_batch_size, *optional, share=self.share)

    def record_stream(self, stream: torch.Stream) -> None:
        """Prevents reuse of the memory until the current work of `stream` is done (CUDA only)."""
        for part in (self.dense, self.sparse, self.label, *self._optional):
            if part is not None:
                part.record_stream(stream)
