"""Projection of embeddings whose fields have widths of their own to the one width that networks take.

Sizes: B samples, F fields, D embedding width, d width of a field's own.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from .layers import glorot_normal


class Projections(nn.Module):
    """A linear map without bias from d to D for each field whose d is not D; other embeddings stay as they are.

    Source: Mixed Dimension Embeddings (arXiv 1909.11810), with one block for each field.

    Args:
        widths: d of each field.
        embedding_dim: D.

    Attributes:
        kernels: float [fields, d, D] by d, for the fields of this width, in their order.
    """

    order: Tensor

    def __init__(self, widths: Sequence[int], embedding_dim: int) -> None:
        super().__init__()
        self._embedding_dim = embedding_dim
        self._fields = {d: [f for f, width in enumerate(widths) if width == d] for d in dict.fromkeys(widths)}
        self.kernels = nn.ParameterDict(
            {
                str(d): nn.Parameter(torch.stack([glorot_normal(d, embedding_dim).detach() for _ in fields]))
                for d, fields in self._fields.items()
                if d != embedding_dim
            }
        )
        grouped = torch.tensor([field for fields in self._fields.values() for field in fields])
        self.register_buffer("order", grouped.argsort(), persistent=False)

    def forward(self, rows: Sequence[Tensor]) -> Tensor:
        """[B, F, D + 1], embeddings and wide weights, of each field's rows [B, d + 1 or more], likewise."""
        groups = []
        for d, fields in self._fields.items():
            group = torch.stack([rows[field] for field in fields], dim=1)
            if d == self._embedding_dim:
                groups.append(group[:, :, : d + 1])
                continue
            kernel = cast(Tensor, self.kernels[str(d)])
            embeddings = torch.einsum("bfi,fij->bfj", group[:, :, :d], kernel).to(group.dtype)
            groups.append(torch.cat([embeddings, group[:, :, d : d + 1]], dim=2))
        return torch.cat(groups, dim=1).index_select(1, self.order)
