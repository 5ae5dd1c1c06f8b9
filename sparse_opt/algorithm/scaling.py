"""Hyperparameters for a batch size: scaling rules, and the presets of the CowClip paper, as pure functions.

A rule sets how values for a base batch change at s times that batch. `half_life` is cowrec's own rule. The others are
from arXiv 2204.06240, sections 3 and 5; where the reference code differs, the values are those of the code, with which
the paper's accuracies were measured.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from math import expm1, inf, log, sqrt
from typing import Any, Literal, Protocol, get_args

from cowrec.errors import UserError

from .clip import CLIP_RULES, ClipRule, ConstantClip, ReferenceCowClip

EmbeddingOptimizer = Literal["adam", "adagrad", "sgd"]


@dataclass(frozen=True)
class Hyperparameters:
    """Hyperparameters that depend on the batch size.

    Attributes:
        embedding_lr: learning rate of the embedding tables, per step, >= 0.
        dense_lr: learning rate of the network after its warm-up, per step, >= 0.
        l2: coefficient of ``l2 * sum(w^2)`` over embeddings and wide weights, >= 0.
        betas: decay of Adam's first and second moment, per step, each in [0, 1), for tables and network.
        eps: summand of the root of Adam's second moment, > 0, for tables and network.
        weight_decay: decoupled decay of the tables, >= 0: a step multiplies weights by ``1 - embedding_lr *
            weight_decay``.
        dense_weight_decay: decoupled weight decay of the network, with ``dense_lr``.

    Raises ValueError: a value is out of range.
    """

    embedding_lr: float
    dense_lr: float
    l2: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    dense_weight_decay: float = 0.0

    def __post_init__(self) -> None:
        for key in ("embedding_lr", "dense_lr", "l2", "weight_decay", "dense_weight_decay"):
            value = getattr(self, key)
            if not 0 <= value < inf:
                raise UserError(f"{key} must be >= 0 and finite, got {value}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"betas must be two numbers in [0, 1), got {self.betas}")
        if not 0 < self.eps < inf:
            raise UserError(f"eps must be > 0 and finite, got {self.eps}")


class ScalingRule(Protocol):
    """Changes of all values that depend on the batch size, at s times the base batch, s > 0."""

    def scale(self, base: Hyperparameters, s: float, embedding: EmbeddingOptimizer) -> Hyperparameters:
        """Returns the values for s times the batch of ``base``; ``embedding`` is the optimizer of the tables."""

    def limit_factor(self, clip: ClipRule, s: float) -> float:
        """Returns the factor of a clip rule's limits."""


@dataclass(frozen=True)
class _Powers:
    """A rule that multiplies values and constant thresholds by powers of s; betas, eps and other limits stay."""

    embedding_lr: float
    l2: float
    dense_lr: float
    threshold: float = 0.5

    def scale(self, base: Hyperparameters, s: float, embedding: EmbeddingOptimizer) -> Hyperparameters:
        scaled = replace(
            base,
            embedding_lr=base.embedding_lr * s**self.embedding_lr,
            dense_lr=base.dense_lr * s**self.dense_lr,
            l2=base.l2 * s**self.l2,
        )
        return _with_decay_of_samples(scaled, base, s)

    def limit_factor(self, clip: ClipRule, s: float) -> float:
        return float(s**self.threshold) if isinstance(clip, ConstantClip) else 1.0


class _NoScaling:
    """A rule under which nothing changes."""

    def scale(self, base: Hyperparameters, s: float, embedding: EmbeddingOptimizer) -> Hyperparameters:
        return base

    def limit_factor(self, clip: ClipRule, s: float) -> float:
        return 1.0


MAX_BETA1 = 0.95
"""Largest beta1 under `half_life`, as a share of sqrt(beta2)."""


@dataclass(frozen=True)
class _HalfLife:
    """Adam's second moment keeps its half-life in samples, and a rare row its movement for each occurrence.

    With ``beta2 -> beta2^s``, the second moment forgets as much in one step as in s steps of the base batch. A rare
    row, which Adam has forgotten since its last occurrence, moves by ``lr / sqrt(1 - beta2)``, whatever its gradient.
    This movement stays the same with ``lr -> lr * k``, ``k = sqrt((1 - beta2^s) / (1 - beta2))``. k is about sqrt(s)
    while s is far below ``1 / (1 - beta2)``, and never exceeds the root of that. For a row that occurs in most steps,
    sqrt(s) keeps the movement for each sample (square-root scaling: Malladi et al., arXiv 2205.10287; half-life: arXiv
    2507.07101). L2 stays: in units of ``lr / sqrt(v)``, its pull for each sample does not change. The root of the
    second moment shrinks to ``k / s``, and eps with it. ``beta1`` stays below sqrt(beta2), because otherwise a step of
    Adam has no bound.

    Adagrad never forgets: the root of its sum over the same samples shrinks to 1/s, like the gradient of a sample, so
    that its learning rate stays (as in MLPerf's DLRM-DCNv2, at all batch sizes). Plain SGD needs lr * s.
    """

    def scale(self, base: Hyperparameters, s: float, embedding: EmbeddingOptimizer) -> Hyperparameters:
        beta1, beta2 = base.betas
        # In logarithms: beta2^s may round to 1, and 1 - beta2^s to 0.
        forgotten = -expm1(s * log(beta2)) if beta2 else 1.0
        k = sqrt(forgotten / (1 - beta2))
        scaled = replace(
            base,
            embedding_lr=base.embedding_lr * {"adam": k, "adagrad": 1.0, "sgd": s}[embedding],
            dense_lr=base.dense_lr * k,
            betas=(min(beta1, MAX_BETA1 * sqrt(beta2**s)), beta2**s),
            eps=base.eps * k / s,
        )
        return _with_decay_of_samples(scaled, base, s)

    def limit_factor(self, clip: ClipRule, s: float) -> float:
        return 1 / s if clip.scope == "row" else 1 / sqrt(s)


SCALING_RULES: dict[str, ScalingRule] = {
    "half_life": _HalfLife(),
    "none": _NoScaling(),
    "sqrt": _Powers(0.5, 0.5, 0.5),
    "sqrt_star": _Powers(0.5, 0, 0.5),
    "linear": _Powers(1, 0, 1),
    "n2_lambda": _Powers(0, 2, 0.5),
    "n2_lambda_table8": _Powers(0, 2, 1),
    "cowclip": _Powers(0, 1, 0.5),
}
"""Scaling rules by name. `sqrt_star` is DeepFM's variant of `sqrt`, and `cowclip` is the paper's rule. The n^2-lambda
rule is listed twice, because the text of the paper and its Table 8 give different dense exponents."""


def scale_hyperparameters(
    base: Hyperparameters,
    *,
    base_batch_size: int,
    batch_size: int,
    rule: str = "half_life",
    embedding: EmbeddingOptimizer = "adam",
) -> Hyperparameters:
    """Scales hyperparameters to another batch size.

    Under every rule but "none", ``lr * weight_decay`` grows with s, which keeps the decay for each sample (arXiv
    2405.13698).

    Example: values tuned at batch 1K, for Adam at 64K::

        base = Hyperparameters(embedding_lr=1e-3, dense_lr=1e-3, l2=1e-5)
        scaled = scale_hyperparameters(base, base_batch_size=1024, batch_size=65536)
        torch.optim.Adam(network.parameters(), lr=scaled.dense_lr, betas=scaled.betas, eps=scaled.eps)

    Args:
        base: values for ``base_batch_size``.
        base_batch_size, batch_size: samples per step over all processes, for ``base`` and for the result.
        rule: a key of :data:`SCALING_RULES`.
        embedding: optimizer of the tables, on which `half_life` depends; row-wise Adagrad is "adagrad".

    Raises ValueError: the rule or the optimizer is unknown, or a batch size is below 1.
    """
    s = _checked_scale(base_batch_size, batch_size, rule)
    if embedding not in get_args(EmbeddingOptimizer):
        raise UserError(f"embedding must be one of {', '.join(get_args(EmbeddingOptimizer))}, got {embedding!r}")
    return base if s == 1 else SCALING_RULES[rule].scale(base, s, embedding)


def scale_clip(clip: ClipRule, *, base_batch_size: int, batch_size: int, rule: str = "half_life") -> ClipRule:
    """Scales a clip rule to another batch size; arguments as in :func:`scale_hyperparameters`.

    Under `half_life`, limits shrink like the gradients, so that the same rows are clipped: limits of a row to 1/s, like
    the gradient of one occurrence, and limits of one table or of all tables to 1/sqrt(s). Under the rules of the paper,
    constant thresholds grow with sqrt(s) (its Table 6), and other limits stay. Under "none" all limits stay.

    Raises ValueError: as in :func:`scale_hyperparameters`, or limits change of a rule not in :data:`CLIP_RULES`.
    """
    s = _checked_scale(base_batch_size, batch_size, rule)
    return _with_limits_times(SCALING_RULES[rule].limit_factor(clip, s), clip)


def _with_decay_of_samples(scaled: Hyperparameters, base: Hyperparameters, s: float) -> Hyperparameters:
    return replace(
        scaled,
        weight_decay=base.weight_decay * s * _ratio(base.embedding_lr, scaled.embedding_lr),
        dense_weight_decay=base.dense_weight_decay * s * _ratio(base.dense_lr, scaled.dense_lr),
    )


def _ratio(lr: float, scaled: float) -> float:
    return lr / scaled if scaled else 1.0


def _with_limits_times(factor: float, clip: ClipRule) -> ClipRule:
    if factor == 1:
        return clip
    if type(clip) not in CLIP_RULES.values():
        raise UserError(
            f"scale_clip knows the values of CLIP_RULES only, got {clip!r}; scale it yourself: its limits become"
            f" {factor:g} times as large"
        )
    # The reference's floor is r^2 * sqrt(D) * bound.
    factors = {"r": factor, "zeta": factor, "bound": 1 / factor, "max_norm": factor}
    values: Any = clip
    scaled: ClipRule = replace(
        values, **{field.name: getattr(clip, field.name) * factors[field.name] for field in fields(values)}
    )
    return scaled


def _checked_scale(base_batch_size: int, batch_size: int, rule: str) -> float:
    if rule not in SCALING_RULES:
        raise UserError(f"scaling rule must be one of {', '.join(SCALING_RULES)}, got {rule!r}")
    for key, value in (("base_batch_size", base_batch_size), ("batch_size", batch_size)):
        if value < 1:
            raise UserError(f"{key} must be at least 1, got {value}")
    return batch_size / base_batch_size


@dataclass(frozen=True)
class Preset:
    """The paper's settings for a data set at one batch size: hyperparameters, clip and schedule."""

    batch_size: int
    hyperparameters: Hyperparameters
    clip: ReferenceCowClip
    epochs: int = 10
    warmup_epochs: float = 1.0
    embedding_init_std: float = 1e-2


def criteo_preset(batch_size: int) -> Preset:
    """CowClip's settings for Criteo: base 1K, embedding lr 1e-4, dense lr 8e-4, l2 1e-5, r = 1, bound 1e-5."""
    base = Hyperparameters(embedding_lr=1e-4, dense_lr=8e-4, l2=1e-5, eps=1e-7)
    scaled = scale_hyperparameters(base, base_batch_size=1024, batch_size=batch_size, rule="cowclip")
    return Preset(batch_size, scaled, ReferenceCowClip(r=1.0, bound=1e-5))


def avazu_preset(batch_size: int) -> Preset:
    """CowClip's settings for Avazu: base 1K, both lr 1e-4, l2 1e-5; r 10 and bound 1e-3 up to 2K, then r 1, bound 1e-4.

    At 128K and above the reference deviates from the rule: dense lr 16e-4 and l2 96e-5.
    """
    base = Hyperparameters(embedding_lr=1e-4, dense_lr=1e-4, l2=1e-5, eps=1e-7)
    scaled = scale_hyperparameters(base, base_batch_size=1024, batch_size=batch_size, rule="cowclip")
    if batch_size >= 128 * 1024:
        scaled = replace(scaled, dense_lr=16e-4, l2=96e-5)
    clip = ReferenceCowClip(r=10.0, bound=1e-3) if batch_size <= 2048 else ReferenceCowClip(r=1.0, bound=1e-4)
    return Preset(batch_size, scaled, clip)


PRESETS: dict[str, Callable[[int], Preset]] = {"criteo": criteo_preset, "avazu": avazu_preset}
