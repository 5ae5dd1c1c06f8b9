"""Quantisation of embedding rows: float16, or int8 with a scale for each row.

Sizes: n rows, P stored width of a table.
"""

from typing import Literal

import torch
from torch import Tensor

Precision = Literal["float32", "float16", "int8"]

_MAX_INT8 = 127  # symmetric: -128 is not used


def quantise(rows: Tensor, precision: Precision) -> dict[str, Tensor]:
    """Converts rows to the form in which they are stored.

    Args:
        rows: float32 [n, P].
        precision: int8 stores ``round(row / scale)`` with ``scale = max |row| / 127``, so the error is at most half a
            scale; float16 rounds to nearest.

    Returns:
        ``rows`` [n, P] in that precision and, for int8, ``scale`` float32 [n], 0 for rows of zeros.

    Raises:
        ValueError: a value cannot be represented in the precision.
    """
    if precision == "float32":
        return {"rows": rows.contiguous()}
    if precision == "float16":
        stored = rows.half()
        if not stored.isfinite().all():
            raise ValueError(
                f"a weight of {rows.abs().max().item():g} exceeds the largest float16, 65504; export in float32"
            )
        return {"rows": stored.contiguous()}
    if not rows.isfinite().all():
        raise ValueError("a weight is not finite and cannot be stored as int8; export in float32")
    scale = rows.abs().amax(1) / _MAX_INT8 if rows.numel() else rows.new_zeros(len(rows))
    rounded = (rows / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round().clamp(-_MAX_INT8, _MAX_INT8)
    return {"rows": rounded.to(torch.int8).contiguous(), "scale": scale}


def dequantise(rows: Tensor, scale: Tensor | None = None) -> Tensor:
    """Converts stored rows [n, P] and, for int8, their scales [n] to float32 [n, P]."""
    return rows.float() if scale is None else rows.float() * scale[:, None]
