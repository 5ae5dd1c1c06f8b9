"""Global batches of an epoch: which positions of the epoch's order each of them has, and each rank's part."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from .shuffle import Window


class GlobalBatches:
    """Consecutive global batches that cover an epoch.

    Args:
        samples: of the epoch.
        batch_size: of the batches after the first ones.
        first: sizes of the first batches, at most ``samples`` in all.
        drop_last: leave out the last batch if it is short.
        shares: of the samples of a step that each batch has; 1 by default.
    """

    def __init__(
        self,
        samples: int,
        batch_size: int,
        first: Sequence[int] = (),
        *,
        drop_last: bool = False,
        shares: Sequence[float] = (),
    ) -> None:
        self._shares = shares
        self._samples, self._batch_size = samples, batch_size
        self._starts = [0, *accumulate(first)]
        full, remainder = divmod(samples - self._starts[-1], batch_size)
        self._steps = len(first) + full + bool(remainder and not drop_last)

    def __len__(self) -> int:
        return self._steps

    def start(self, step: int) -> int:
        """Position of the first sample of batch ``step``, which is the number of samples before it."""
        after = step - (len(self._starts) - 1)
        start = self._starts[step] if after < 0 else self._starts[-1] + after * self._batch_size
        return min(start, self._samples)

    def share(self, step: int) -> float:
        """Share of the samples of its step that batch ``step`` has."""
        return self._shares[step] if self._shares else 1.0

    def passes(self, step: int, passes: int) -> int:
        """Parts of batch ``step`` that :meth:`in_passes` makes: no more than it has samples."""
        return min(passes, self.start(step + 1) - self.start(step))

    def in_passes(self, passes: int) -> "GlobalBatches":
        """Splits each batch into consecutive parts whose sizes differ by at most one."""
        if passes == 1:
            return self
        sizes, shares = list[int](), list[float]()
        for step in range(len(self)):
            size, number = self.start(step + 1) - self.start(step), self.passes(step, passes)
            parts = [(part + 1) * size // number - part * size // number for part in range(number)]
            sizes += parts
            shares += [each / size for each in parts]
        return GlobalBatches(sum(sizes), 1, sizes, shares=shares)

    def of_rank(self, step: int, rank: int, world_size: int) -> tuple[int, int, int]:
        """Returns (start, stop, size): the positions of ``rank``'s slice of batch ``step``, and that batch's size.

        The slices of the ranks are contiguous, cover the batch and differ by at most one sample in size.
        """
        first = self.start(step)
        size = self.start(step + 1) - first
        return first + rank * size // world_size, first + (rank + 1) * size // world_size, size

    def within(self, window: Window, step: int, rank: int, world_size: int) -> list[slice]:
        """Returns the positions in the window of ``rank``'s slices of the batches from ``step`` on.

        The last slice is that of the batch that ends in a later window, as far as it is in this one.
        """
        slices = []
        for each in range(step, len(self)):
            start, stop, _ = self.of_rank(each, rank, world_size)
            slices.append(slice(*(min(max(end - window.start, 0), window.samples) for end in (start, stop))))
            if stop > window.stop:
                break
        return slices

    def turns(
        self, windows: Iterable[Window], step: int, rank: int, world_size: int
    ) -> Iterator[tuple[Window, list[slice]]]:
        """Yields consecutive windows, from that of batch ``step`` on, and ``rank``'s slices in each, :meth:`within`."""
        for window in windows:
            slices = self.within(window, step, rank, world_size)
            yield window, slices
            step += len(slices)
            if slices and self.of_rank(step - 1, rank, world_size)[1] > window.stop:
                step -= 1
