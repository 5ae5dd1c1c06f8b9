"""CowClip and its relatives: how large the gradient of an embedding row may be, as pure functions on tensors.

CowClip (arXiv 2204.06240) bounds each row's gradient by the row's own weight norm, once for every occurrence of the
row's id in the global batch. The other rules are those that the paper holds it against (Table 6). A table's row is what
the paper calls a column, and a table what it calls a field. U is the number of distinct rows, D the width of the
embedding, T the number of tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

Scope = Literal["row", "field", "global"]
"""Whose norm a rule bounds: one row's, that of a table's rows together, or that of all tables' rows together."""


@dataclass(frozen=True)
class RowLimit:
    """A limit in the one form that all rules share: ``count^p * max(r * ||w||, floor)``, p in {0, 1}.

    It is a row's; under a rule for fields or for all tables, their rows' together, and then p = 0.

    Attributes:
        r: share of the weight norm; dimensionless, >= 0.
        floor: least value of the bracket, in units of the weight norm, >= 0.
        per_occurrence: p = 1, every occurrence of the id adds one bracket; else p = 0.
    """

    r: float
    floor: float
    per_occurrence: bool

    def of(self, weight_norms: Tensor, counts: Tensor) -> Tensor:
        """Limits of rows with the given weight norms, float [U], and occurrences, int [U]; float [U]."""
        limits = (self.r * weight_norms).clamp_min(self.floor)
        return limits * counts if self.per_occurrence else limits


class ClipRule(Protocol):
    """What a clip rule must offer: whose norm it bounds, and the limit for embeddings of a given width."""

    name: ClassVar[str]
    scope: ClassVar[Scope]

    def limit(self, embedding_dim: int) -> RowLimit: ...


@dataclass(frozen=True)
class NoClip:
    """No limit: the gradient passes as it is."""

    name: ClassVar[str] = "none"
    scope: ClassVar[Scope] = "row"

    def limit(self, embedding_dim: int) -> RowLimit:
        return RowLimit(r=0.0, floor=inf, per_occurrence=False)


@dataclass(frozen=True)
class CowClip:
    """The paper's form: ``count * max(r * ||w||, zeta)``. Source: arXiv 2204.06240, Algorithm 1, line 8.

    Attributes:
        r: share of the weight norm that one occurrence may move; dimensionless, > 0.
        zeta: floor of that bound, in units of the weight norm, >= 0.

    Raises:
        ValueError: r or zeta out of range.
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
    """The reference code's form: ``r * count * max(||w||, r * sqrt(D) * bound)``.

    It is the paper's with zeta = r^2 * sqrt(D) * bound; the published accuracies were measured with it.

    Attributes:
        r: the reference's ``--clip``; dimensionless, > 0.
        bound: the reference's ``--bound``, in units of one weight, >= 0.

    Raises:
        ValueError: r or bound out of range.
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
    """The paper's column-wise constant threshold (Table 6): every row's gradient norm is at most ``max_norm``.

    Attributes:
        max_norm: the threshold, in units of the gradient norm, > 0. The paper scales it by sqrt(s) with the batch, as
            :func:`scale_clip` does.

    Raises:
        ValueError: max_norm out of range.
    """

    max_norm: float
    name: ClassVar[str] = "constant"
    scope: ClassVar[Scope] = "row"

    def __post_init__(self) -> None:
        _require("clip.max_norm", self.max_norm, positive=True)

    def limit(self, embedding_dim: int) -> RowLimit:
        return RowLimit(r=0.0, floor=self.max_norm, per_occurrence=False)


@dataclass(frozen=True)
class FieldClip(ConstantClip):
    """The paper's field-wise threshold (Table 6): a table's gradient, over its rows, has a norm of at most max_norm.

    The rows are those present in the batch, unless ``absent_rows = "dense"`` moves them all: without L2 the others have
    no gradient, and with it they cost the whole table at every step.
    """

    name: ClassVar[str] = "field"
    scope: ClassVar[Scope] = "field"


@dataclass(frozen=True)
class GlobalClip(ConstantClip):
    """The paper's global threshold (Table 6): all tables' gradients together have a norm of at most max_norm.

    The rows are those present in the batch, as in :class:`FieldClip`. Dense weights are no part of it.
    """

    name: ClassVar[str] = "global"
    scope: ClassVar[Scope] = "global"


@dataclass(frozen=True)
class AdaptiveFieldClip:
    """The paper's adaptive field-wise threshold (Table 6): ``max(r * ||w||, zeta)`` for a table's gradient.

    Read here as CowClip's bracket with the table in the place of the row. Both norms are over the table's present rows,
    as in :class:`FieldClip`. No count is in it: a table's ids are about as many at every step, so that r holds them.

    Attributes:
        r: share of the weight norm that a step may move; dimensionless, > 0.
        zeta: floor of that bound, in units of the weight norm, >= 0.

    Raises:
        ValueError: r or zeta out of range.
    """

    r: float = 1.0
    zeta: float = 1e-5
    name: ClassVar[str] = "adaptive_field"
    scope: ClassVar[Scope] = "field"

    def __post_init__(self) -> None:
        _require("clip.r", self.r, positive=True)
        _require("clip.zeta", self.zeta, positive=False)

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
        r: share of the weight norm that one occurrence may move; dimensionless, > 0.
        zeta: floor of that bound, in units of the weight norm, >= 0.

    Returns:
        float [U], float32 or the weights' own type if wider. Source: arXiv 2204.06240, Algorithm 1, line 8.
    """
    return CowClip(r, zeta).limit(weights.shape[-1]).of(row_norms(weights), counts)


def reference_cowclip_limits(weights: Tensor, counts: Tensor, *, r: float, bound: float) -> Tensor:
    """Largest allowed gradient norm of each row as in the reference: ``r * counts * max(||w||, r * sqrt(D) * bound)``.

    Args and returns as in :func:`cowclip_limits`; ``r`` is the reference's ``--clip``, ``bound`` its ``--bound``.
    """
    return ReferenceCowClip(r, bound).limit(weights.shape[-1]).of(row_norms(weights), counts)


def clip_scales(grads: Tensor, limits: Tensor) -> Tensor:
    """Factor that brings each row's gradient within its limit: ``min(1, limit / ||g||)``; 1 for a zero gradient.

    Args:
        grads: gradient of each row, float [U, D].
        limits: largest allowed norm of each, float [U], >= 0.

    Returns:
        float [U] in (0, 1]; float32 or the gradients' own type if wider. A gradient that is not finite stays so.
    """
    return scales_of_norms(row_norms(grads), limits)


def scales_of_norms(norms: Tensor, limits: Tensor) -> Tensor:
    """``min(1, limit / norm)`` of norms and limits of one shape; 1 for a norm of zero."""
    return torch.where(norms > limits, limits / norms, torch.ones_like(norms))


def clip_rows(grads: Tensor, weights: Tensor, counts: Tensor, rule: ClipRule) -> Tensor:
    """Row gradients clipped by a rule; the gradients' shape and type.

    Args:
        grads: gradient of the mean loss over the global batch, summed over each row's occurrences, float [U, D].
        weights: the rows before the update, float [U, D].
        counts: occurrences of each row in the global batch, int [U]; the reference counts absent rows once.
        rule: one of :data:`CLIP_RULES` whose scope is a row.

    Raises:
        ValueError: shapes that do not fit together, or a rule for more than a row.
    """
    if rule.scope != "row":
        raise ValueError(f"clip.rule = {rule.name!r} bounds more than one row's norm; use clip_tables")
    if grads.shape != weights.shape or grads.ndim != 2 or counts.shape != grads.shape[:1]:
        raise ValueError(
            f"clip_rows needs grads [U, D], weights [U, D] and counts [U], "
            f"got {list(grads.shape)}, {list(weights.shape)} and {list(counts.shape)}"
        )
    limits = rule.limit(grads.shape[1]).of(row_norms(weights), counts)
    return (grads * clip_scales(grads, limits)[:, None]).to(grads.dtype)


def clip_tables(
    grads: Sequence[Tensor], weights: Sequence[Tensor], counts: Sequence[Tensor], rule: ClipRule
) -> list[Tensor]:
    """The present rows' gradients of several tables, clipped by a rule of any scope.

    Args:
        grads, weights, counts: of each table, as in :func:`clip_rows`.
        rule: one of :data:`CLIP_RULES`.
    """
    if rule.scope == "row":
        return [clip_rows(*table, rule) for table in zip(grads, weights, counts, strict=True)]
    pairs = zip(grads, weights, strict=True)
    squares = torch.stack([torch.stack([rows.double().square().sum() for rows in pair]) for pair in pairs])
    if rule.scope == "global":
        squares = squares.sum(0, keepdim=True).expand_as(squares)
    clipped = []
    for grad, (grad_norm, weight_norm) in zip(grads, squares.sqrt(), strict=True):
        limit = rule.limit(grad.shape[1]).of(weight_norm, torch.ones_like(weight_norm))
        clipped.append((grad * scales_of_norms(grad_norm, limit)).to(grad.dtype))
    return clipped


def row_norms(rows: Tensor) -> Tensor:
    """L2 norm of each row of [U, D]; [U], in float32 or the rows' own type if wider.

    Summed in float64: the norm then depends on neither order nor back end, and neither does what is clipped.
    """
    norms = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
    return norms.to(torch.promote_types(rows.dtype, torch.float32))


def _require(key: str, value: float, *, positive: bool) -> None:
    if not 0 <= value < inf or (positive and value == 0):
        least = "> 0" if positive else ">= 0"
        raise ValueError(f'{key} must be {least} and finite, got {value}; to train unclipped set clip.rule = "none"')
