"""Embedding front: looks up all fields at once and hands their embeddings and wide weights to a network.

Sizes: B samples, F fields, D embedding width, P stored width of a table, N dense features.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def physical_dim(embedding_dim: int) -> int:
    """Stored width P of a table: the smallest multiple of 4 that holds D columns and the wide weight.

    Columns [0, D) are the embedding, column D the wide weight; the rest have zero gradient, and stay zero if they start
    so. FBGEMM's fused tables need the multiple of 4; sharing the row makes one lookup serve both parts.
    """
    return (embedding_dim // 4 + 1) * 4


class Features(NamedTuple):
    """What a network computes on."""

    deep: Tensor
    """Embeddings, float [B, F, D], fields in the order of the tables."""
    wide: Tensor
    """Sum of the samples' wide weights, float [B]."""
    flat: Tensor
    """All embeddings, field-major, then the dense features: float [B, F * D + N]."""


class EmbeddingFront(nn.Module):
    """One table per field, and the dense features beside them.

    Args:
        tables: one per field, each with one feature name and width ``physical_dim(embedding_dim)``.
        embedding_dim: D.
        num_dense: N, may be 0.
        is_weighted: the ids carry weights.
        device: of the tables; the meta device leaves their memory to the sharding.

    Raises:
        ValueError: no tables, or one of another shape than this.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        embedding_dim: int,
        num_dense: int,
        *,
        is_weighted: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if not tables:
            raise ValueError("a model needs at least one sparse field, got none")
        stored = physical_dim(embedding_dim)
        for table in tables:
            if len(table.feature_names) != 1:
                raise ValueError(f"table {table.name} serves the fields {table.feature_names}; give each its own table")
            if table.embedding_dim != stored:
                raise ValueError(
                    f"table {table.name} is {table.embedding_dim} wide, but embedding_dim = {embedding_dim} needs "
                    f"physical_dim({embedding_dim}) = {stored}"
                )
            if is_weighted and table.pooling is not PoolingType.SUM:
                raise ValueError(
                    f"table {table.name} is pooled by {table.pooling.value}, which TorchRec does not do with weighted "
                    "ids; pool by sum and give the ids the weight 1 / length"
                )
        # By name below: the order of the looked-up columns depends on the sharding plan.
        self.fields = [table.feature_names[0] for table in tables]
        self.embedding_dim = embedding_dim
        self.num_dense = num_dense
        self.width = len(tables) * embedding_dim + num_dense
        self._columns = [embedding_dim, 1, stored - embedding_dim - 1]
        self.embeddings = EmbeddingBagCollection(tables=list(tables), is_weighted=is_weighted, device=device)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Features:
        """Looks up ``sparse``; ``dense`` is float [B, N]."""
        looked_up = self.embeddings(sparse).to_dict()
        rows = torch.stack([looked_up[field] for field in self.fields], dim=1)  # [B, F, P]
        # One split, so that the backward writes one gradient of the whole width, zero in the spare columns.
        columns = torch.split(rows, self._columns, dim=2)
        deep, wide = columns[0], columns[1]
        flat = torch.cat([deep.flatten(1), dense], dim=1)
        return Features(deep=deep, wide=wide.sum(dim=(1, 2)), flat=flat)
