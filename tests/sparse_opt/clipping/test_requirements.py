"""Fused settings and data types under which the clip or L2 would silently be wrong."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType

from cowrec.sparse_opt import AdamConfig, CowClip, EmbeddingAdam, attach_cowclip
from sharded_case import Case, gather_tables, process_group, sharded_model, train_step

CASE = Case(rows=(40,), features=(("a",),), max_ids=1)
SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    with process_group(0, 1, str(tmp_path)):
        yield


def model_with(dtype: torch.dtype = torch.float32, **fused_params: Any) -> Any:
    return sharded_model(CASE, CASE.draw()["tables"], dtype, fused_params={**SGD, **fused_params})


@pytest.mark.parametrize("attach", [attach_cowclip, lambda model, rule: EmbeddingAdam(model, AdamConfig(), rule)])
def test_gradient_clipping_by_fbgemm_is_refused(attach: Any) -> None:
    model = model_with(gradient_clipping=True, max_gradient=0.5)
    with pytest.raises(ValueError, match=r"'t0' is under FBGEMM's gradient_clipping.* to 0.5 after"):
        attach(model, CowClip())


@pytest.mark.parametrize("output", [SparseType.FP16, SparseType.BF16])
def test_l2_in_output_gradients_of_half_precision_is_refused(output: SparseType) -> None:
    model = model_with(output_dtype=output)
    with pytest.raises(ValueError, match=r"'t0' has outputs in half precision.*set output_dtype to float32"):
        attach_cowclip(model, CowClip(), single_id_bags=True, l2=1e-5)
    attach_cowclip(model, CowClip(), single_id_bags=True)


def test_a_small_l2_moves_rows_of_float16_tables() -> None:
    """Against a loop that rounds the weights in each step; 2 * l2 * w itself underflows in float16."""
    config = AdamConfig(lr=1e-4, l2=1e-6, eps=1e-9, absent_rows="dense")
    model = model_with(torch.float16)
    EmbeddingAdam(model, config)
    (before,) = gather_tables(CASE, model)
    expected = torch.from_numpy(before).half()
    first, second = torch.zeros(expected.shape), torch.zeros(expected.shape)
    nothing = {"a": [(np.empty(0, np.int64), np.empty(0, np.float32))] * CASE.batch}
    targets = CASE.draw()["steps"][0][1]
    for step in range(1, 6):
        train_step(CASE, model, nothing, targets, 0, CASE.batch)
        grad = 2 * config.l2 * expected.float()
        first, second = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad**2
        moved = (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + config.eps)
        expected = (expected.float() - config.lr * moved).half()
    (got,) = gather_tables(CASE, model)
    small = abs(before) > 1e-3
    assert (got != before)[small & (abs(before) < 2e-2)].mean() > 0.9
    np.testing.assert_allclose(got, expected.float().numpy(), rtol=2e-3, atol=1e-7)
