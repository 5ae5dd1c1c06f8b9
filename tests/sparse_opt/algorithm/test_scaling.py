"""Scaling rules equal the paper's table, and presets the reference's numbers."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from cowrec.sparse_opt import (
    PRESETS,
    SCALING_RULES,
    AdaptiveFieldClip,
    ClipRule,
    ConstantClip,
    CowClip,
    FieldClip,
    GlobalClip,
    Hyperparameters,
    NoClip,
    ReferenceCowClip,
    clip_rows,
    scale_clip,
    scale_hyperparameters,
)
from refusal import refused

BASE = Hyperparameters(embedding_lr=1e-4, dense_lr=8e-4, l2=1e-5, betas=(0.9, 0.999), eps=1e-7)


@pytest.mark.parametrize(
    ("rule", "embedding_lr", "l2", "dense_lr"),
    [  # multiples at s = 16
        ("none", 1, 1, 1),
        ("sqrt", 4, 4, 4),
        ("sqrt_star", 4, 1, 4),
        ("linear", 16, 1, 16),
        ("n2_lambda", 1, 256, 4),
        ("n2_lambda_table8", 1, 256, 16),
        ("cowclip", 1, 16, 4),
    ],
)
def test_rules(rule: str, embedding_lr: float, l2: float, dense_lr: float) -> None:
    scaled = scale_hyperparameters(BASE, base_batch_size=1024, batch_size=16 * 1024, rule=rule)
    assert scaled.embedding_lr == pytest.approx(embedding_lr * 1e-4, rel=1e-12)
    assert scaled.l2 == pytest.approx(l2 * 1e-5, rel=1e-12)
    assert scaled.dense_lr == pytest.approx(dense_lr * 8e-4, rel=1e-12)
    assert (scaled.betas, scaled.eps) == (BASE.betas, BASE.eps)


@pytest.mark.parametrize("rule", SCALING_RULES)
@pytest.mark.parametrize("s", [1 / 4, 1, 3, 64])
def test_decoupled_decay_keeps_its_pace_in_samples(rule: str, s: float) -> None:
    """A step of s times the samples decays by s times as much, under "none" by as much as the base."""
    base = replace(BASE, weight_decay=0.01, dense_weight_decay=0.03)
    scaled = scale_hyperparameters(base, base_batch_size=1024, batch_size=round(1024 * s), rule=rule)
    times = 1 if rule == "none" else s
    assert scaled.embedding_lr * scaled.weight_decay == pytest.approx(times * 1e-4 * 0.01, rel=1e-12)
    assert scaled.dense_lr * scaled.dense_weight_decay == pytest.approx(times * 8e-4 * 0.03, rel=1e-12)
    assert s != 1 or scaled == base
    frozen = replace(base, embedding_lr=0.0)
    assert scale_hyperparameters(frozen, base_batch_size=8, batch_size=64, rule=rule).embedding_lr == 0


def second_moment(values: Hyperparameters, gradients: np.ndarray) -> float:
    """Root of Adam's second moment after the gradients of some steps, from zero."""
    moment = 0.0
    for gradient in gradients:
        moment = values.betas[1] * moment + (1 - values.betas[1]) * gradient**2
    return moment**0.5


@pytest.mark.parametrize("s", [1 / 8, 1 / 2, 2, 8, 128, 512, 1024, 4096])
def test_half_life_keeps_what_a_sample_does_to_a_rare_row(s: float) -> None:
    """The gradient of one occurrence is 1/s of the base batch's, for the loss is the mean over s times the samples."""
    scaled = scale_hyperparameters(BASE, base_batch_size=4096, batch_size=round(4096 * s), rule="half_life")
    (_, slow), (beta1, beta2) = BASE.betas, scaled.betas
    assert scaled.l2 == BASE.l2
    assert np.log(beta2) == pytest.approx(s * np.log(slow), rel=1e-9)  # the half-life in samples
    before, after = second_moment(BASE, np.ones(1)), second_moment(scaled, np.ones(1) / s)
    for key in ("embedding_lr", "dense_lr"):  # the first movement, relative to the first moment
        moves = getattr(scaled, key) / s / after
        assert moves == pytest.approx(getattr(BASE, key) / before, rel=1e-9)
    assert scaled.eps / after == pytest.approx(BASE.eps / before, rel=1e-9)
    assert beta1 < min(beta2**0.5, BASE.betas[0] + 1e-12)


@pytest.mark.parametrize("embedding", ["adagrad", "sgd"])
@pytest.mark.parametrize("s", [1 / 8, 8, 512])
def test_half_life_under_other_optimizers(embedding: str, s: float) -> None:
    """Ten steps have one occurrence of a rare row each, whose gradient is the sample's share of the mean."""
    moved = []
    for size in (8, round(8 * s)):
        values = scale_hyperparameters(BASE, base_batch_size=8, batch_size=size, embedding=embedding)
        gradients = np.ones(10) / size
        root = np.sqrt(np.cumsum(gradients**2)) if embedding == "adagrad" else 1
        moved.append((values.embedding_lr * gradients / root).sum())
    assert moved[1] == pytest.approx(moved[0], rel=1e-9)


def test_half_life_is_square_root_scaling_within_the_memory_of_adam() -> None:
    scaled = scale_hyperparameters(BASE, base_batch_size=1024, batch_size=4096, rule="half_life")
    assert scaled.embedding_lr == pytest.approx(2e-4, rel=2e-3)
    assert scaled.eps == pytest.approx(5e-8, rel=2e-3)
    forgetful = replace(BASE, betas=(0.9, 0.0))
    assert scale_hyperparameters(forgetful, base_batch_size=1, batch_size=9, rule="half_life").dense_lr == 8e-4


def test_presets_are_the_references() -> None:
    criteo = PRESETS["criteo"](128 * 1024)
    assert criteo.hyperparameters.embedding_lr == 1e-4
    assert criteo.hyperparameters.l2 == pytest.approx(128e-5, rel=1e-12)
    assert criteo.hyperparameters.dense_lr == pytest.approx(8e-4 * 128**0.5, rel=1e-12)
    assert criteo.clip == ReferenceCowClip(r=1.0, bound=1e-5)
    assert (criteo.epochs, criteo.warmup_epochs, criteo.embedding_init_std) == (10, 1.0, 1e-2)

    avazu = PRESETS["avazu"]
    assert avazu(2048).clip == ReferenceCowClip(r=10.0, bound=1e-3)
    assert avazu(4096).clip == ReferenceCowClip(r=1.0, bound=1e-4)
    assert avazu(1024).hyperparameters == Hyperparameters(1e-4, 1e-4, 1e-5, eps=1e-7)
    assert avazu(64 * 1024).hyperparameters.dense_lr == pytest.approx(8e-4, rel=1e-12)
    assert avazu(128 * 1024).hyperparameters == Hyperparameters(1e-4, 16e-4, 96e-5, eps=1e-7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rule": "cowclop"}, "scaling rule must be one of half_life, none, .*got 'cowclop'"),
        ({"embedding": "lion"}, "embedding must be one of adam, adagrad, sgd, got 'lion'"),
    ],
)
def test_refuses(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scale_hyperparameters(BASE, **{"base_batch_size": 1024, "batch_size": 2048, "rule": "cowclip"} | change)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_refuses_invalid_values(value: float) -> None:
    refused("dense_lr must be >= 0 and finite", Hyperparameters, 1e-4, value, 0.0)
    refused("betas must be two numbers in", Hyperparameters, 1e-4, 1e-4, 0.0, betas=(0.9, value))
    refused("eps must be > 0 and finite", Hyperparameters, 1e-4, 1e-4, 0.0, eps=value)


def test_constant_thresholds_grow_with_the_root_of_the_batch() -> None:
    sizes = {"base_batch_size": 1024, "batch_size": 16 * 1024}
    for kind in (ConstantClip, FieldClip, GlobalClip):
        assert scale_clip(kind(0.25), **sizes, rule="cowclip") == kind(1.0)
        assert scale_clip(kind(0.25), **sizes, rule="none") == kind(0.25)
    for clip in (NoClip(), CowClip(), ReferenceCowClip(), AdaptiveFieldClip()):
        assert scale_clip(clip, **sizes, rule="cowclip") == clip
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        scale_clip(NoClip(), base_batch_size=1024, batch_size=0, rule="cowclip")


@pytest.mark.parametrize("clip", [CowClip(0.5, 1e-3), ReferenceCowClip(0.5, 1e-3), ConstantClip(0.2)])
def test_half_life_clips_a_row_of_the_base_batch_in_the_larger_one_too(clip: ClipRule) -> None:
    """Gradients of one occurrence are 1/s of the base batch's."""
    torch.manual_seed(0)
    weights, grads = torch.randn(50, 4) * torch.logspace(-4, 0, 50)[:, None], torch.randn(50, 4) * 0.1
    once = torch.ones(50, dtype=torch.int64)
    scaled = scale_clip(clip, base_batch_size=8, batch_size=1024)
    before, after = clip_rows(grads, weights, once, clip), clip_rows(grads / 128, weights, once, scaled)
    assert 0 < (before != grads).any(1).sum() < 50
    torch.testing.assert_close(after * 128, before)


def test_half_life_keeps_the_clip_of_tables_whose_ids_are_all_rare() -> None:
    """16 times the batch has 16 times the rows, with 1/16 of the gradient each: a norm of 1/4."""
    for clip in (FieldClip(1.0), GlobalClip(1.0), AdaptiveFieldClip(1.0, 1e-2)):
        scaled = scale_clip(clip, base_batch_size=1, batch_size=16)
        assert vars(scaled) == pytest.approx({key: value / 4 for key, value in vars(clip).items()})
    assert scale_clip(NoClip(), base_batch_size=1, batch_size=16) == NoClip()


@dataclass(frozen=True)
class OwnRule(CowClip):
    share: float = 0.5


def test_limits_of_a_rule_of_ones_own_are_not_guessed() -> None:
    sizes = {"base_batch_size": 1, "batch_size": 16}
    refused(r"got OwnRule\(.*share=0.5\); scale it yourself: .* 0.0625 times as large", scale_clip, OwnRule(), **sizes)
    assert scale_clip(OwnRule(), **sizes, rule="cowclip") == OwnRule()
