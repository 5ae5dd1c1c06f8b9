"""Samples of equal score, in the order of the scores, over all processes and in bounded memory.

N samples of this process, P processes, K masses of a sample, C samples of a part, U distinct scores.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

PART = 1 << 20
"""Samples of all processes in one part, for each process; it bounds the memory beside the samples."""
_INDEX = (1 << 32) - 1
"""Bits of an entry that are a sample's index; those above are its key."""

Masses = Callable[[Tensor], Tensor]
"""Returns the masses of samples, int64 [C, K] and at least 0, from their indices, int64 [C]."""


class Blocks(NamedTuple):
    """Samples of equal score, in ascending order of the scores.

    Attributes:
        scores: distinct, float32 [U].
        masses: of the samples of each score, int64 [U, K].
        below: masses of all samples of lower scores, int64 [U, K].
    """

    scores: Tensor
    masses: Tensor
    below: Tensor


def total_masses(count: int, masses: Masses, device: torch.device, together: bool) -> Tensor:
    """The masses of all samples, int64 [K]; all processes call together if ``together``."""
    indices = (torch.arange(start, min(start + PART, count), device=device) for start in range(0, max(count, 1), PART))
    total = torch.stack([masses(each).sum(0) for each in indices]).sum(0)
    if together:
        dist.all_reduce(total)
    return total


def score_blocks(scores: Tensor, masses: Masses, together: bool) -> Iterator[Blocks]:
    """Yields the blocks of all samples, part by part in ascending order; over all processes each score comes once.

    Processes sort their own samples and exchange them by ranges of scores, which are drawn so that each process has
    about ``PART`` of a part's samples; a score that most samples have is one entry of each process. Takes 8 bytes for
    each sample of this process, and memory for a few parts. Samples without any mass are left out.

    Args:
        scores: of this process's samples, float32 [N].
        masses: of the samples by their indices.
        together: all processes call together, each with its own samples, and exhaust the iterator; otherwise the
            samples are those of this process alone.
    """
    size, rank = (dist.get_world_size(), dist.get_rank()) if together else (1, 0)
    entries = _sorted_entries(scores)
    counts = _gathered(torch.tensor([len(entries)], device=scores.device), together)
    parts = max(1, -(-int(counts.sum()) // (PART * size)))
    cuts = _cuts(entries, counts, parts * size, together)
    stops = torch.searchsorted(entries, cuts[size - 1 :: size] << 32).tolist()
    before: Tensor | int = 0
    for part, (start, stop) in enumerate(zip([0, *stops], [*stops, len(entries)], strict=True)):
        keys, own = _summed_slices(entries[start:stop], masses)
        if together:
            keys, own = _exchanged(keys, own, cuts[part * size : part * size + size - 1])
        of_ranks = _gathered(own.sum(0), together)
        below = before + of_ranks[:rank].sum(0) + own.cumsum(0) - own
        before = before + of_ranks.sum(0)
        yield Blocks(_key_order(keys.int()).view(torch.float32), own, below)


def _sorted_entries(scores: Tensor) -> Tensor:
    """Key and index of each sample in one number, ascending, int64 [N]; equal scores have equal keys."""
    entries = torch.empty(len(scores), dtype=torch.int64, device=scores.device)
    for start in range(0, len(scores), PART):
        part = scores[start : start + PART]
        keys = _key_order((part + 0.0).view(torch.int32))  # -0.0 becomes 0.0
        entries[start : start + PART] = (keys.long() << 32) + torch.arange(start, start + len(part), device=part.device)
    if entries.is_cuda:
        return entries.sort().values
    entries.numpy().sort()  # in place, and several times as fast as torch's
    return entries


def _key_order(bits: Tensor) -> Tensor:
    """Bits of float32 numbers as int32 of their order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _cuts(entries: Tensor, counts: Tensor, ranges: int, together: bool) -> Tensor:
    """Keys that divide all samples into ranges of about equal numbers, ascending, int64 [ranges - 1].

    From entries at even distances of each process's order, each of which stands for those up to the next.

    Args:
        entries: of this process.
        counts: entries of each process, int64 [P, 1].
        ranges: their number.
        together: all processes call together.
    """
    drawn = 8 * ranges
    places = torch.arange(drawn, device=entries.device) * len(entries) // drawn
    keys = entries[places] >> 32 if len(entries) else torch.zeros_like(places)
    keys, order = _gathered(keys, together).flatten().sort()
    reached = counts.expand(-1, drawn).flatten()[order].cumsum(0)
    wanted = torch.arange(1, ranges, device=entries.device) * int(counts.sum()) // ranges * drawn
    return keys[torch.searchsorted(reached, wanted).clamp_max(len(keys) - 1)]


def _gathered(own: Tensor, together: bool) -> Tensor:
    """Tensors of equal length, int64 [L], of all processes: [P, L]."""
    if not together:
        return own[None]
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    return torch.stack(gathered)


def _summed_slices(entries: Tensor, masses: Masses) -> tuple[Tensor, Tensor]:
    """Distinct keys of sorted entries, int64 [U], and the masses of each, int64 [U, K]."""
    slices = entries.split(PART) if len(entries) else [entries]
    summed = [_summed(each >> 32, masses(each & _INDEX)) for each in slices]
    keys, own = (torch.cat(column) for column in zip(*summed, strict=True))
    return _summed(keys, own)


def _summed(keys: Tensor, masses: Tensor) -> tuple[Tensor, Tensor]:
    """Adds the masses, int64 [C, K], of equal keys, ascending int64 [C]; keys without mass are left out."""
    last = torch.ones_like(keys, dtype=torch.bool)
    last[:-1] = keys[1:] != keys[:-1]
    reached = masses.cumsum(0)[last]
    sums = reached.clone()
    sums[1:] -= reached[:-1]
    kept = sums.any(1)
    return keys[last][kept], sums[kept]


def _exchanged(keys: Tensor, masses: Tensor, cuts: Tensor) -> tuple[Tensor, Tensor]:
    """Sends each process the keys of its range, and returns those of this one's, with the masses of all processes."""
    ends = torch.tensor([0, *torch.searchsorted(keys, cuts).tolist(), len(keys)], device=keys.device)
    sizes = ends.diff()
    received_sizes = torch.empty_like(sizes)
    dist.all_to_all_single(received_sizes, sizes)
    sent = torch.cat([keys[:, None], masses], 1)
    splits = received_sizes.tolist()
    received = sent.new_empty(sum(splits), sent.shape[1])
    dist.all_to_all_single(received, sent, splits, sizes.tolist())
    keys = received[:, 0].contiguous()
    order = keys.argsort() if keys.is_cuda else torch.from_numpy(keys.numpy().argsort())
    return _summed(keys[order], received[order, 1:])
