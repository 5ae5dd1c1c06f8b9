"""Clip functions equal the reference's recorded output and plain loops, and handle edge cases."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cowrec.sparse_opt import (
    AdaptiveFieldClip,
    ConstantClip,
    CowClip,
    FieldClip,
    GlobalClip,
    NoClip,
    ReferenceCowClip,
    clip_rows,
    clip_scales,
    clip_tables,
)
from cowrec.sparse_opt.algorithm.clip import limits_of_norms, row_norms


def test_equals_the_reference(golden_dir: Path) -> None:
    files = sorted(golden_dir.glob("cow_clip_*.npz"))
    assert files, f"no cow_clip_*.npz in {golden_dir}"
    for file in files:
        golden = np.load(file)
        rule = ReferenceCowClip(r=float(golden["ratio"]), bound=float(golden["bound"]))
        counts = torch.from_numpy(golden["row_counts"])
        for kind, tolerance in (("32", 5e-7), ("64", 1e-12)):
            grads, weights = torch.from_numpy(golden["g" + kind]), torch.from_numpy(golden["w" + kind])
            clipped = clip_rows(grads, weights, counts, rule)
            assert clipped.dtype == grads.dtype
            np.testing.assert_allclose(clipped.numpy(), golden["out" + kind], rtol=tolerance, err_msg=file.name)
        limits = limits_of_norms(row_norms(weights), counts, *rule.limit(weights.shape[1]))
        np.testing.assert_allclose(limits.numpy(), golden["thr64"], rtol=1e-12, err_msg=file.name)


# Below 1e-12 squares underflow in float32: such a gradient counts as zero and is not changed.
numbers = st.floats(-1e6, 1e6, width=32).filter(lambda x: x == 0 or abs(x) > 1e-12)


@given(
    rows=st.integers(0, 6).flatmap(
        lambda n: st.tuples(
            arrays(np.float32, (n, 3), elements=numbers),
            arrays(np.float32, (n, 3), elements=numbers),
            arrays(np.int64, n, elements=st.integers(1, 1000)),
        )
    ),
    r=st.floats(1e-3, 10),
    zeta=st.floats(0, 1),
)
def test_a_clipped_gradient_keeps_its_direction_and_its_limit(rows, r: float, zeta: float) -> None:
    grads, weights, counts = map(torch.from_numpy, rows)
    clipped = clip_rows(grads, weights, counts, CowClip(r, zeta)).double()
    for g, w, count, got in zip(grads.double(), weights.double(), counts, clipped, strict=True):
        limit = count * max(r * w.norm(), zeta)
        expected = g * min(1.0, float(limit / g.norm())) if g.norm() > 0 else g
        # Relative to the gradient's norm: norms are measured in float32.
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-6 * float(expected.norm()) + 1e-37)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_measured_in_float32(dtype: torch.dtype) -> None:
    # 300^2 is beyond float16's largest number: the norm would be infinite and the gradient would vanish.
    grads = torch.full((2, 8), 300.0, dtype=dtype)
    clipped = clip_rows(grads, torch.full((2, 8), 0.5, dtype=dtype), torch.tensor([1, 4]), CowClip(1.0, 0.0))
    assert clipped.dtype == dtype
    torch.testing.assert_close(clipped.float(), torch.tensor([[0.5], [2.0]]).expand(2, 8), rtol=1e-2, atol=0)


def test_non_finite_gradients_stay_non_finite() -> None:
    grads = torch.tensor([[float("nan"), 1.0], [float("inf"), 1.0]])
    clipped = clip_rows(grads, torch.ones(2, 2), torch.tensor([1, 1]), CowClip())
    assert clipped.isnan().any(1).all()
    assert clip_scales(grads, torch.ones(2)).tolist() == [1, 0]
    assert clip_scales(torch.zeros(1, 2), torch.zeros(1)).item() == 1


ONES = torch.ones(2, 3), torch.ones(2, 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CowClip(r=0.0), r'clip.r must be > 0 and finite, got 0.0; to train unclipped set clip.rule = "none"'),
        (lambda: CowClip(zeta=-1.0), "clip.zeta must be >= 0"),
        (lambda: ReferenceCowClip(r=float("nan")), "clip.r must be > 0"),
        (lambda: ConstantClip(float("inf")), "clip.max_norm must be > 0 and finite"),
        (
            lambda: clip_rows(*ONES, torch.ones(2), GlobalClip(1.0)),
            "clip.rule = 'global' bounds more than one row's norm; use clip_tables",
        ),
        (lambda: clip_rows(*ONES, torch.ones(3), NoClip()), r"\[2, 3\], \[2, 3\] and \[3\]"),
    ],
)
def test_refuses(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def some_tables() -> list[list[torch.Tensor]]:
    """Gradients, weights and counts of three tables of different shapes, one without rows."""
    torch.manual_seed(0)
    shapes = ((5, 4), (0, 4), (3, 8))
    tables = [[torch.randn(shape, dtype=torch.float64) for shape in shapes] for _ in range(2)]
    return [*tables, [torch.randint(1, 9, (rows,)) for rows, _ in shapes]]


@pytest.mark.parametrize("max_norm", [0.5, 1e3])
def test_global_and_field_rules_equal_torch(max_norm: float) -> None:
    grads, weights, counts = some_tables()

    def by_torch(groups: list[list[int]]) -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(weight) for weight in weights]
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad.clone()
        for group in groups:
            torch.nn.utils.clip_grad_norm_([parameters[t] for t in group], max_norm)
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    for rule, groups in ((GlobalClip(max_norm), [[0, 1, 2]]), (FieldClip(max_norm), [[0], [1], [2]])):
        # torch adds 1e-6 to the norm before it divides.
        torch.testing.assert_close(clip_tables(grads, weights, counts, rule), by_torch(groups), rtol=1e-6, atol=0)


def test_adaptive_field_rule_bounds_a_table_by_its_weights() -> None:
    grads, weights, counts = some_tables()
    weights[2] = torch.zeros_like(weights[2])
    clipped = clip_tables(grads, weights, counts, AdaptiveFieldClip(r=0.1, zeta=0.01))
    assert clipped[0].norm().item() == pytest.approx(0.1 * weights[0].norm().item(), rel=1e-12)
    assert clipped[1].shape == (0, 4)
    assert clipped[2].norm().item() == pytest.approx(0.01, rel=1e-12)
    torch.testing.assert_close(clipped[0] / clipped[0].norm(), grads[0] / grads[0].norm())
