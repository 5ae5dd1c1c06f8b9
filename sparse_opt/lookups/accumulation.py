"""Backward passes of a lookup that wait for others of their step: accumulated, they become one, with one clip."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from cowrec.errors import UserError

from ..kernels.layout import LookupBackward
from ..tbe.bags import BagsOfLookup


class Accumulation:
    """Backward passes of a lookup that wait for the last one of their step.

    Args:
        bags: finds the bags of the lookup's forward passes.

    Attributes:
        passes: backward passes of a step.
    """

    def __init__(self, bags: BagsOfLookup):
        self.passes = 1
        self._bags, self._waiting, self._finite = bags, list[LookupBackward](), list[Tensor]()

    @property
    def waiting(self) -> int:
        """Number of passes that wait."""
        return len(self._waiting)

    def drop(self) -> None:
        """Forgets the passes that wait."""
        self._waiting, self._finite = [], []

    def forget(self, table: int, rows: Tensor) -> None:
        """Leaves rows of a table, int64 [n], that belong to new ids out of the passes that wait."""
        self._waiting = [self._without(each, table, rows) for each in self._waiting]

    def _without(self, backward: LookupBackward, table: int, rows: Tensor) -> LookupBackward:
        indices, offsets, blocks, _ = backward.bags
        begin, end = offsets[blocks.first_bag[blocks.first_block[table : table + 2]]].tolist()
        kept = torch.ones(len(indices), dtype=torch.bool, device=indices.device)
        kept[begin:end] = ~torch.isin(indices[begin:end], rows.to(indices))
        # In sequences, where every id is a bag, a feature's ids of one pass move together, as in _joined.
        bags = blocks.first_bag if self._bags.is_sequence else offsets
        inputs = {"indices": indices[kept], "offsets": functional.pad(kept.cumsum(0), (1, 0))[bags.long()]}
        weights, grad = backward.id_weights, backward.output_grad
        return LookupBackward(
            self._bags.of(inputs),
            None if weights is None else weights[kept],
            grad[kept] if self._bags.is_sequence else grad,
        )

    def add(self, backward: LookupBackward, finite: Tensor | None) -> LookupBackward | None:
        """Adds a pass; returns the passes of a step as one once they are complete, else None.

        Bags are ordered by feature, then by pass, so that the ids of a row stay in their order. If one of the passes is
        not finite (bool []), none has a gradient: a GradScaler skips the step of the other parameters too.
        """
        if self.passes == 1:
            return backward
        if backward.output_grad.dim() == 1:
            raise UserError(
                "backward passes with a variable batch size per feature cannot be accumulated; take a step for each,"
                " or give every feature the same batch size"
            )
        self._waiting.append(_copied(backward))
        if finite is not None:
            self._finite.append(finite)
        if len(self._waiting) < self.passes:
            return None
        step = self._joined(self._waiting)
        if self._finite:
            step = replace(step, output_grad=torch.where(torch.stack(self._finite).all(), step.output_grad, 0))
        self.drop()
        return step

    def _joined(self, passes: list[LookupBackward]) -> LookupBackward:
        # Where every id is a bag, a feature's ids of one pass move together.
        is_sequence = self._bags.is_sequence
        offsets = [each.bags.blocks.first_bag if is_sequence else each.bags.offsets for each in passes]
        features = len(passes[0].bags.blocks.table)
        bags = [(len(each) - 1) // features for each in offsets]
        numbers = torch.arange(features * sum(bags)).split([features * size for size in bags])
        by_feature = [each.view(features, size) for each, size in zip(numbers, bags, strict=True)]
        device = offsets[0].device
        order = torch.cat(by_feature, dim=1).flatten().int()
        if device.type == "cuda":
            order = order.pin_memory().to(device, non_blocking=True)
        lengths = torch.cat([each.diff() for each in offsets]).long()
        ids = torch.arange(sum(each.bags.indices.numel() for each in passes), device=device)
        lengths, ids, _ = torch.ops.fbgemm.permute_1D_sparse_data(order, lengths, ids, None, ids.numel())
        indices = torch.cat([each.bags.indices for each in passes])[ids]
        weights = None
        if given := [each.id_weights for each in passes if each.id_weights is not None]:
            ones = [given[0].new_ones(each.bags.indices.numel()) for each in passes]
            own = [one if each.id_weights is None else each.id_weights for each, one in zip(passes, ones, strict=True)]
            weights = torch.cat(own)[ids]
        grads = torch.cat([each.output_grad for each in passes])
        inputs: dict[str, Tensor] = {
            "indices": indices,
            "offsets": torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        }
        return LookupBackward(self._bags.of(inputs), weights, grads[ids] if is_sequence else grads)


def _copied(backward: LookupBackward) -> LookupBackward:
    """A pass with its ids in memory of its own: after a backward pass callers may overwrite the batch."""
    bags, weights = backward.bags, backward.id_weights
    blocks = bags.blocks._replace(first_bag=bags.blocks.first_bag.clone())
    bags = bags._replace(indices=bags.indices.clone(), offsets=bags.offsets.clone(), blocks=blocks)
    return replace(backward, bags=bags, id_weights=None if weights is None else weights.detach().clone(), ids=None)
