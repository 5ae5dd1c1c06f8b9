"""Embedding rows in fewer bytes: float16, or int8 with a scale for each row.

Sizes: n rows, P stored width of a table.
"""

from typing import Literal

import torch
from torch import Tensor

Precision = Literal["float32", "float16", "int8"]

_LARGEST = 127  # symmetric: -128 is not used


def quantise(rows: Tensor, precision: Precision) -> dict[str, Tensor]:
    """Rows as they are stored.

    Args:
        rows: float32 [n, P].
        precision: of what is stored. int8 rounds ``row / scale`` with ``scale = max |row| / 127``, so that no value is
            off by more than half a scale; float16 rounds to the nearest.

    Returns:
        ``rows`` [n, P] in that precision and, for int8, ``scale`` float32 [n], 0 for rows of zeros.

    Raises:
        ValueError: a value that the precision does not have.
    """
    if precision == "float32":
        return {"rows": rows.contiguous()}
    if precision == "float16":
        stored = rows.half()
        if not stored.isfinite().all():
            raise ValueError(
                f"a weight of {rows.abs().max().item():g} does not fit into float16, whose largest is 65504; export in"
                " float32"
            )
        return {"rows": stored.contiguous()}
    if not rows.isfinite().all():
        raise ValueError("a weight is not a finite number, which int8 cannot hold; export in float32")
    scale = rows.abs().amax(1) / _LARGEST if rows.numel() else rows.new_zeros(len(rows))
    whole = (rows / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round().clamp(-_LARGEST, _LARGEST)
    return {"rows": whole.to(torch.int8).contiguous(), "scale": scale}


def dequantise(rows: Tensor, scale: Tensor | None = None) -> Tensor:
    """float32 [n, P] of stored rows [n, P] and, for int8, their scales [n]."""
    return rows.float() if scale is None else rows.float() * scale[:, None]
