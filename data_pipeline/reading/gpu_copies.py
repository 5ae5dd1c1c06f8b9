"""Copies of batches to the GPU, each during the step of the batch before."""

from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from cowrec.data_pipeline.dataset.batch import Batch


def copied_to_gpu(batches: Generator["Batch", None, None], device: torch.device) -> Generator["Batch", None, None]:
    """Copies page-locked batches on a separate stream, one ahead of the consumer."""
    stream = torch.cuda.Stream(device)

    def copy(batch: "Batch") -> tuple["Batch", torch.cuda.Event]:
        with torch.cuda.stream(stream):
            return batch.to(device, non_blocking=True), stream.record_event()

    def hand_over(batch: "Batch", copied: torch.cuda.Event) -> "Batch":
        consumer = torch.cuda.current_stream(device)
        consumer.wait_event(copied)
        batch.record_stream(consumer)
        return batch

    with closing(batches):
        ahead: tuple[Batch, torch.cuda.Event] | None = None
        for batch in batches:
            following = copy(batch)
            if ahead:
                yield hand_over(*ahead)
            ahead = following
        if ahead:
            yield hand_over(*ahead)
