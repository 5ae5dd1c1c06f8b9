"""Gradient clipping of embedding rows: CowClip and the paper's other rules, as pure functions on tensors.

CowClip (arXiv 2204.06240) bounds each row's gradient by the row's weight norm times the occurrences of the row's id in
the global batch. The paper calls a row a column, and a table a field. Sizes: U distinct rows, D embedding width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from cowrec.errors import UserError

Scope = Literal["row", "field", "global"]
"""Rows whose gradients have one common norm under a rule: a single row, a table's rows, or the rows of all tables."""


class RowLimit(NamedTuple):
    """Parameters of a limit, which has this form under all rules: ``count^p * max(r * ||w||, floor)``, p in {0, 1}.

    Under a rule for a table or for all tables, the norm is that of all their rows together, and p = 0.

    Attributes:
        r: share of the weight norm; dimensionless, >= 0.
        floor: least value of the bracket, in units of the weight norm, >= 0.
        per_occurrence: whether p = 1, so that every occurrence of the id adds one bracket.
    """

    r: float
    floor: float
    per_occurrence: bool


def limits_of_norms(
    weight_norms: Tensor, counts: Tensor, r: float | Tensor, floor: float | Tensor, per_occurrence: bool | Tensor
) -> Tensor:
    """Largest allowed gradient norms, float [U]: ``counts^p * max(r * weight_norms, floor)``.

    Args:
        weight_norms: norms before the update, float [U].
        counts: occurrences in the global batch, int [U].
        r, floor, per_occurrence: as in :class:`RowLimit`, for all rows or for each row, [U].
    """
    return (r * weight_norms).clamp_min(floor) * counts**per_occurrence


class ClipRule(Protocol):
    """Interface of a clip rule: the scope of its norm, and the limit for embeddings of a given width."""

    name: ClassVar[str]
    scope: ClassVar[Scope]

    def limit(self, embedding_dim: int) -> RowLimit: ...


@dataclass(frozen=True)
class NoClip:
    """No limit: the gradient is not changed."""

    name: ClassVar[str] = "none"
    scope: ClassVar[Scope] = "row"

    def limit(self, embedding_dim: int) -> RowLimit:
        return RowLimit(r=0.0, floor=inf, per_occurrence=False)


@dataclass(frozen=True)
class CowClip:
    """CowClip as in the paper: ``count * max(r * ||w||, zeta)``. Source: arXiv 2204.06240, Algorithm 1, line 8.

    Attributes:
        r: share of the weight norm allowed for each occurrence; dimensionless, > 0.
        zeta: floor of that bound, in units of the weight norm, >= 0.
    """

    r: float = 1.0
    zeta: float = 1e-5
    name: ClassVar[str] = "cowclip"
    scope: ClassVar[Scope] = "row"

    def __post_init__(self) -> None:
        _require("clip.r", self.r, positive=True)
        _require("clip.zeta", self.zeta, positive=False)

    def limit(self, embedding_dim: int) -> RowLimit:
        return RowLimit(self.r, self.zeta, per_occurrence=True)


@dataclass(frozen=True)
class ReferenceCowClip:
    """CowClip as in the reference code: ``r * count * max(||w||, r * sqrt(D) * bound)``.

    This equals the paper's form with zeta = r^2 * sqrt(D) * bound. The paper's accuracies were measured with it.

    Attributes:
        r: the reference's ``--clip``; dimensionless, > 0.
        bound: the reference's ``--bound``, in units of one weight, >= 0.
    """

    r: float = 1.0
    bound: float = 1e-5
    name: ClassVar[str] = "cowclip_reference"
    scope: ClassVar[Scope] = "row"

    def __post_init__(self) -> None:
        _require("clip.r", self.r, positive=True)
        _require("clip.bound", self.bound, positive=False)

    def limit(self, embedding_dim: int) -> RowLimit:
        return RowLimit(self.r, self.r * self.r * sqrt(embedding_dim) * self.bound, per_occurrence=True)


@dataclass(frozen=True)
class ConstantClip:
    """Constant threshold for each row (the paper's Table 6, column-wise): a norm of at most ``max_norm``, > 0."""

    max_norm: float
    name: ClassVar[str] = "constant"
    scope: ClassVar[Scope] = "row"

    def __post_init__(self) -> None:
        _require("clip.max_norm", self.max_norm, positive=True)

    def limit(self, embedding_dim: int) -> RowLimit:
        return RowLimit(r=0.0, floor=self.max_norm, per_occurrence=False)


@dataclass(frozen=True)
class FieldClip(ConstantClip):
    """Constant threshold for each table (the paper's Table 6, field-wise): a gradient norm of at most ``max_norm``.

    The norm is over the rows of the batch, or over all rows under ``absent_rows = "dense"``, which updates all rows.
    """

    name: ClassVar[str] = "field"
    scope: ClassVar[Scope] = "field"


@dataclass(frozen=True)
class GlobalClip(ConstantClip):
    """Constant threshold for all tables together (the paper's Table 6, global): a norm of at most ``max_norm``.

    The norm is over the rows as in :class:`FieldClip`, without the network's weights.
    """

    name: ClassVar[str] = "global"
    scope: ClassVar[Scope] = "global"


@dataclass(frozen=True)
class AdaptiveFieldClip(CowClip):
    """Adaptive threshold for each table (the paper's Table 6, adaptive field-wise): ``max(r * ||w||, zeta)``.

    Both norms are over the table's rows as in :class:`FieldClip`. There is no count, because a table has about as many
    ids in every batch: r is the share of the weight norm that a step may move.
    """

    name: ClassVar[str] = "adaptive_field"
    scope: ClassVar[Scope] = "field"

    def limit(self, embedding_dim: int) -> RowLimit:
        return RowLimit(self.r, self.zeta, per_occurrence=False)


CLIP_RULES: dict[str, type[ClipRule]] = {
    rule.name: rule
    for rule in (NoClip, CowClip, ReferenceCowClip, ConstantClip, FieldClip, AdaptiveFieldClip, GlobalClip)
}


def cowclip_limits(weights: Tensor, counts: Tensor, *, r: float, zeta: float) -> Tensor:
    """Largest allowed gradient norm of each row: ``counts * max(r * ||w||, zeta)``.

    Args:
        weights: rows before the update, float [U, D]; half precisions are measured in float32.
        counts: occurrences of each row in the global batch, int [U], at least 1.
        r, zeta: as in :class:`CowClip`.

    Returns float [U], float32 or the weights' own type if wider. Source: arXiv 2204.06240, Algorithm 1, line 8.
    """
    return limits_of_norms(row_norms(weights), counts, *CowClip(r, zeta).limit(weights.shape[-1]))


def clip_scales(grads: Tensor, limits: Tensor) -> Tensor:
    """Factor that scales each row's gradient to its limit: ``min(1, limit / ||g||)``; 1 for a zero gradient.

    Args:
        grads: gradient of each row, float [U, D].
        limits: largest allowed norm of each row's gradient, float [U], >= 0.

    Returns float [U] in [0, 1], float32 or the gradients' own type if wider. The factor of an infinite norm is 0, and
    that of NaN is 1, so that a gradient that is not finite stays so.
    """
    return scales_of_norms(row_norms(grads), limits)


def scales_of_norms(norms: Tensor, limits: Tensor) -> Tensor:
    """``min(1, limit / norm)`` of norms and limits of one shape; 1 for a norm of zero."""
    return torch.where(norms > limits, limits / norms, torch.ones_like(norms))


def clip_rows(grads: Tensor, weights: Tensor, counts: Tensor, rule: ClipRule) -> Tensor:
    """Clips row gradients by a rule; returns the gradients' shape and type.

    Args:
        grads: gradient of the mean loss over the global batch, summed over each row's occurrences, float [U, D].
        weights: the rows before the update, float [U, D].
        counts: occurrences of each row in the global batch, int [U]; the reference counts absent rows once.
        rule: a rule whose scope is a row.

    Raises ValueError: the shapes do not match, or the rule bounds more than one row's norm.
    """
    if rule.scope != "row":
        raise UserError(f"clip.rule = {rule.name!r} bounds more than one row's norm; use clip_tables")
    if grads.shape != weights.shape or grads.ndim != 2 or counts.shape != grads.shape[:1]:
        raise UserError(
            f"clip_rows needs grads [U, D], weights [U, D] and counts [U], "
            f"got {list(grads.shape)}, {list(weights.shape)} and {list(counts.shape)}"
        )
    limits = limits_of_norms(row_norms(weights), counts, *rule.limit(grads.shape[1]))
    return (grads * clip_scales(grads, limits)[:, None]).to(grads.dtype)


def clip_tables(
    grads: Sequence[Tensor], weights: Sequence[Tensor], counts: Sequence[Tensor], rule: ClipRule
) -> list[Tensor]:
    """Clips the gradients of several tables' rows as :func:`clip_rows`, by a rule of any scope."""
    if rule.scope == "row":
        return [clip_rows(*table, rule) for table in zip(grads, weights, counts, strict=True)]
    pairs = zip(grads, weights, strict=True)
    squares = torch.stack([torch.stack([rows.double().square().sum() for rows in pair]) for pair in pairs])
    if rule.scope == "global":
        squares = squares.sum(0, keepdim=True).expand_as(squares)
    clipped = []
    for grad, (grad_norm, weight_norm) in zip(grads, squares.sqrt(), strict=True):
        limit = limits_of_norms(weight_norm, torch.ones_like(weight_norm), *rule.limit(grad.shape[1]))
        clipped.append((grad * scales_of_norms(grad_norm, limit)).to(grad.dtype))
    return clipped


def row_norms(rows: Tensor) -> Tensor:
    """L2 norm of each row of [U, D]; [U], in float32 or the rows' own type if wider.

    Sums are in float64, so that neither norms nor the set of clipped rows depend on the order or on the back end.
    """
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
    return norms.to(torch.promote_types(rows.dtype, torch.float32))


def _require(key: str, value: float, *, positive: bool) -> None:
    if not 0 <= value < inf or (positive and value == 0):
        least = "> 0" if positive else ">= 0"
        raise UserError(f'{key} must be {least} and finite, got {value}; to train unclipped set clip.rule = "none"')
