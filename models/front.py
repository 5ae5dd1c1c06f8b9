"""Embedding front: looks up all fields at once and passes their embeddings and wide weights to a network.

Sizes: B samples, F fields, D embedding width, P stored width of a table, N dense features.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor


def physical_dim(embedding_dim: int) -> int:
    """Stored width P of a table: the smallest multiple of 4 that holds D columns and the wide weight.

    Columns [0, D) are the embedding, column D is the wide weight; further columns have zero gradient and stay zero if
    initialised to zero. FBGEMM's fused tables need the multiple of 4; one lookup serves both parts of a row.
    """
    return (embedding_dim // 4 + 1) * 4


class Features(NamedTuple):
    """Inputs of a network."""

    rows: Tensor
    """Looked-up rows, float [B, F, P], fields in the order of the tables; the D columns of embeddings come first."""
    wide: Tensor
    """Sum of the samples' wide weights, float [B]."""
    flat: Tensor
    """All embeddings, field-major, then the dense features: [B, F * D + N], under autocast in its dtype."""


class EmbeddingFront(nn.Module):
    """Embedding tables, one per field or group of fields, and the dense features beside them.

    Args:
        tables: each of width ``physical_dim(embedding_dim)``; their feature names are the fields.
        embedding_dim: D.
        num_dense: N, may be 0.
        is_weighted: the ids carry weights.
        fields: order of the fields; by default that of the tables.
        device: device of the tables; with the meta device the sharding allocates them.

    Raises:
        ValueError: no tables, or a table of another width or pooling than the model needs.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        embedding_dim: int,
        num_dense: int,
        *,
        is_weighted: bool = False,
        fields: Sequence[str] | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if not tables:
            raise ValueError("a model needs at least one sparse field, got none")
        stored = physical_dim(embedding_dim)
        for table in tables:
            if table.embedding_dim != stored:
                raise ValueError(
                    f"table {table.name} is {table.embedding_dim} wide, but embedding_dim = {embedding_dim} needs "
                    f"physical_dim({embedding_dim}) = {stored}"
                )
            if is_weighted and table.pooling is not PoolingType.SUM:
                raise ValueError(
                    f"table {table.name} has pooling {table.pooling.value}, which TorchRec does not support with "
                    "weighted ids; pool by sum and give the ids the weight 1 / length"
                )
        # By name below: the order of the looked-up columns depends on the sharding plan.
        self.fields = list(fields or (field for table in tables for field in table.feature_names))
        self.embedding_dim = embedding_dim
        self.num_dense = num_dense
        self.width = len(self.fields) * embedding_dim + num_dense
        self.embeddings = EmbeddingBagCollection(tables=list(tables), is_weighted=is_weighted, device=device)
        self.layout = _Layout(self.fields, embedding_dim)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Features:
        """Looks up ``sparse``; ``dense`` is float [B, N]."""
        return self.layout(self.embeddings(sparse), dense)


class LookedUpFront(nn.Module):
    """Replacement of an :class:`EmbeddingFront` without tables, for rows that are looked up elsewhere, as in serving.

    Args:
        num_fields: F.
        embedding_dim: D.
        num_dense: N, may be 0.
    """

    def __init__(self, num_fields: int, embedding_dim: int, num_dense: int) -> None:
        super().__init__()
        self.embedding_dim = embedding_dim
        self.num_dense = num_dense
        self.width = num_fields * embedding_dim + num_dense

    def forward(self, dense: Tensor, rows: Tensor) -> Features:
        """Features from dense features [B, N] and pooled rows [B, F, P], fields in the order of the tables."""
        return _features(rows, dense, self.embedding_dim)


Front = EmbeddingFront | LookedUpFront


class _Layout(nn.Module):
    """Converts the looked-up rows to a network's features.

    A module is one operation for TorchRec's pipeline, which traces the code that calls the tables.
    """

    def __init__(self, fields: Sequence[str], embedding_dim: int) -> None:
        super().__init__()
        self._fields, self._embedding_dim = list(fields), embedding_dim

    def forward(self, looked_up: KeyedTensor, dense: Tensor) -> Features:
        if looked_up.keys() == self._fields:
            rows = looked_up.values().unflatten(1, (len(self._fields), -1))
        else:  # another order, by the sharding plan
            by_field = looked_up.to_dict()
            rows = torch.stack([by_field[field] for field in self._fields], dim=1)
        return _features(rows, dense, self._embedding_dim)


def _features(rows: Tensor, dense: Tensor, embedding_dim: int) -> Features:
    kind = rows.device.type
    dtype = torch.promote_types(rows.dtype, dense.dtype)
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    return Features(rows, *_WideAndFlat.apply(rows, dense, embedding_dim, dtype))


class _WideAndFlat(torch.autograd.Function):
    """``wide`` and ``flat`` of :class:`Features` with few passes over the rows, which take time at large batches."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, dense: Tensor, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        samples, fields, stored = rows.shape
        ctx.shape, ctx.dim, ctx.dtypes = (samples, fields, stored), dim, (rows.dtype, dense.dtype)
        flat = rows.new_empty(samples, fields * dim + dense.shape[1], dtype=dtype)
        flat[:, : fields * dim].unflatten(1, (fields, dim)).copy_(rows[:, :, :dim])
        flat[:, fields * dim :] = dense
        return rows[:, :, dim].sum(1), flat

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        (samples, fields, stored), dim = ctx.shape, ctx.dim
        grad_wide, grad_flat = grads
        grad_rows = grad_wide.new_empty(samples, fields, stored, dtype=ctx.dtypes[0])
        grad_rows[:, :, :dim] = grad_flat[:, : fields * dim].unflatten(1, (fields, dim))
        grad_rows[:, :, dim] = grad_wide[:, None]
        grad_rows[:, :, dim + 1 :] = 0
        grad_dense = grad_flat[:, fields * dim :].to(ctx.dtypes[1]) if ctx.needs_input_grad[1] else None
        return grad_rows, grad_dense, None, None
