"""Steps of EmbeddingAdam that a CUDA graph repeats, in which no code of the optimizer runs on the host."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor

from .embedding_adam import EmbeddingAdam


class GraphedSteps:
    """What the host does for the steps of ``adam`` that a CUDA graph repeats."""

    def __init__(self, adam: EmbeddingAdam):
        self._adam = adam

    @property
    def are_possible(self) -> bool:
        """True if a graph can repeat a step: it reads all that changes from the device, and waits for nothing."""
        adam = self._adam
        return adam.config.absent_rows != "dense" and all(each.wrapped.rows.is_capturable for each in adam.lookups)

    def prepare(self) -> None:
        """Prepares the device for the coming step; call it before the capture and each replay of the graph."""
        for each in self._adam.collections:
            each.history.prepare(each.step + 1, each.lr)

    def count(self) -> None:
        """Counts a step that the graph has taken."""
        for each in self._adam.collections:
            each.count_step()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Takes back what the host counts while a step is captured, since none is taken."""
        with ExitStack() as stack:
            for each in self._adam.collections:
                stack.callback(each.history.forget_after, each.step)
                for adam in each.lookups:
                    stack.enter_context(adam.capturing())
            yield

    def addresses(self) -> tuple[int, ...]:
        """Addresses of the tensors that the graph reads; capture it again when one has changed."""
        return tuple(each.data_ptr() for adam in self._adam.lookups for each in adam.replaceable())

    def read_by_graph(self) -> tuple[Tensor, ...]:
        """Tensors of the graph, which must hold them as long as it is replayed."""
        return tuple(each for adam in self._adam.lookups for each in adam.read_by_graph())
