"""Self-check of the clip: in the first steps, some rows must take the update that their limits allow.

The expected update is computed in plain torch from the ids, the output gradient and the rows before the step, and is
compared with the row after FBGEMM's update. If FBGEMM's backward read a copy of what the clip has written, for example,
a model would otherwise train without the clip.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..algorithm.clip import limits_of_norms, scales_of_norms
from ..kernels.layout import LookupBackward, LookupIds
from ..kernels.torch_rows import parts_of_positions, row_begins, row_sums, with_weights
from ..lookups.backward import Expect
from ..lookups.wrapped_lookup import WrappedLookup
from ..tbe.lookup import TracedUpdate

_ROWS = 4
"""Rows of a lookup that are checked, and number of the most clipped rows that are checked too."""
_STEPS = 100
"""Steps in which clipped rows are looked for."""
_TOLERANCE = 0.01
"""Relative error of a row's gradient that is allowed beyond rounding."""


class UpdateCheck:
    """Check of a lookup's first step, and of its first ``steps`` steps in which rows are clipped."""

    def __init__(self, wrapped: WrappedLookup, steps: int):
        self.wrapped, self._seen = wrapped, 0
        self._left = 0 if wrapped.lookup.has_dense_gradient else steps

    def of_forward(self, output: Tensor) -> Expect | None:
        """Returns :meth:`StepCheck.expect` for the backward passes of an output; None without a check."""
        captured = output.is_cuda and torch.cuda.is_current_stream_capturing()
        update = self.wrapped.lookup.traced_update() if self._left > 0 and not captured else None
        if update is None or output.grad_fn is None:
            return None
        check = StepCheck(self, update)
        output.grad_fn.register_hook(check.compare)  # runs after FBGEMM's update
        return check.expect

    def begin(self) -> bool:
        """Counts a step that the clip has recorded; returns whether the step is checked."""
        self._seen += 1
        clips = bool((self.wrapped.statistics.latest.ratio > 1).any())
        is_checked = self._left > 0 and (clips or self._seen == 1)
        self._left = self._left - clips if self._seen < _STEPS else 0
        return is_checked


class _Expected(NamedTuple):
    """Expected update of a row: what the optimizer keeps of it, before and after, and the allowed error."""

    table: int
    row: int
    before: Tensor
    after: Tensor
    allowed: Tensor
    clip: str


class StepCheck:
    """Check of one backward pass of a lookup."""

    def __init__(self, check: UpdateCheck, update: TracedUpdate):
        self._check, self._update, self._rows = check, update, list[_Expected]()

    def expect(self, backward: LookupBackward, l2: float, factors: Tensor | None) -> None:
        """Computes the updates of some rows, after the clip of the unscaled backward pass and before FBGEMM's update.

        ``factors``, the ids' clip factors, [nnz], show which rows are clipped most; None if there are none.
        """
        self._rows = []
        if not backward.bags.indices.numel() or not self._check.begin():
            return
        wrapped = self._check.wrapped
        ids = wrapped.rows.find_rows(backward.bags)
        chosen = torch.linspace(0, len(ids.row) - 1, _ROWS, device=ids.row.device).long()
        if factors is not None:
            lowest = factors[ids.order].topk(min(_ROWS, len(ids.row)), largest=False).indices
            chosen = torch.cat([chosen, lowest])
        row = ids.row[chosen].unique()
        grads, weights, noise, counts, table = _gradients_of(wrapped, ids, backward, row)
        grads = grads + 2 * l2 * weights
        measured = torch.arange(grads.shape[1], device=grads.device) < wrapped.limits.clips.columns[table][:, None]
        norms, weight_norms = (torch.where(measured, values, 0).norm(dim=1) for values in (grads, weights))
        _, r, floor, per_occurrence = (limit[table] for limit in wrapped.limits.clips)
        limits = limits_of_norms(weight_norms, counts, r, floor, per_occurrence)
        if not wrapped.is_local:  # a norm includes other rows, or columns on other ranks
            slot = parts_of_positions(ids.begin, len(ids.row))[torch.searchsorted(ids.row, row)]
            limits = norms / wrapped.statistics.latest.ratio[slot]
        grads = torch.where(measured, scales_of_norms(norms, limits)[:, None] * grads, grads)
        noise += _TOLERANCE * grads.abs().amax(1, keepdim=True)
        if factors is None:
            written = torch.finfo(backward.output_grad.dtype)
            noise += written.eps * (grads.abs() + written.smallest_normal)
        index = row - wrapped.layout.first_row[table]
        numbers = (table.tolist(), index.tolist(), counts.tolist(), norms.tolist(), limits.tolist())
        for i, (t, at, count, norm, limit) in enumerate(zip(*numbers, strict=True)):
            kept, dim = self._update.kept[t], wrapped.lookup.shards[t].embedding_dim
            before, grad, error = kept[at].double(), grads[i, :dim], noise[i, :dim]
            after, *others = (self._update.step(before, gradient) for gradient in (grad, grad + error, grad - error))
            kind, errors = torch.finfo(kept.dtype), torch.stack([(stepped - after).abs() for stepped in others])
            allowed = errors.amax(0) + 4 * kind.eps * (before.abs() + after.abs() + kind.smallest_normal)
            clip = f"{count} times in the batch, with a gradient of norm {norm:.4g} and a limit of {limit:.4g}"
            self._rows.append(_Expected(t, at, before, after, allowed, clip))

    def compare(self, *_: Any) -> None:
        """Compares the rows after FBGEMM's update. Raises RuntimeError if a row has taken another update."""
        rows, self._rows = self._rows, []
        for row in rows:
            got = self._update.kept[row.table][row.row].double()
            if row.after.isfinite().all() and not ((got - row.after).abs() <= row.allowed).all():
                shard = self._check.wrapped.lookup.shards[row.table]
                found, expected = ((after - row.before).norm().item() for after in (got, row.after))
                raise RuntimeError(
                    f"the clip did not reach the update of table {shard.name!r}: row {shard.first_row + row.row} is"
                    f" {row.clip}, by which its {self._update.name} should have changed by {expected:.4g}, but changed"
                    f" by {found:.4g}. FBGEMM has read other numbers than the clip wrote, as under hooks on saved"
                    " tensors or casts that copy them; or another thread or optimizer has changed the row meanwhile."
                    " The step has been taken: begin again from an earlier checkpoint. Without this check: verify=0"
                )


def _gradients_of(
    wrapped: WrappedLookup, ids: LookupIds, backward: LookupBackward, row: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes gradients [n, D] of sorted rows, int [n], the rows' weights, rounding of sums, counts and tables."""
    here = torch.isin(ids.row, row)
    order, rows = ids.order[here], ids.row[here]
    own = LookupIds(ids.address[order], torch.arange(len(order), device=order.device), rows, row_begins(rows))
    factors = None if backward.id_weights is None else backward.id_weights[order].double()
    grad = backward.output_grad.double()
    sums = row_sums(wrapped.layout, own, factors, grad)
    sizes = row_sums(wrapped.layout, own, None if factors is None else factors.abs(), grad.abs())
    found, n = with_weights(sums, wrapped.layout, wrapped.lookup.flat_weights()), len(row)
    counts = sums.counts.count[:n]
    noise = torch.finfo(torch.float32).eps * counts[:, None] * sizes.sums[:n]
    return found.grad[:n], found.weight[:n].double(), noise, counts, sums.table[:n]
