"""Embedding front: looks up all fields at once and passes their embeddings and wide weights to a network.

Sizes: B samples, F fields, D embedding width, d embedding width of a single field, P stored width of a row, N dense
features, L positions of a sequence, K keys of all fields. A sequence has L keys, and any other field has one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn

from cowrec.errors import UserError

from .layers import glorot_normal
from .linear_relu import uses_kernels

if TYPE_CHECKING:
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

Sparse: TypeAlias = "KeyedJaggedTensor | Tensor | tuple[Tensor, Tensor]"
"""Input of a network for its sparse fields: ids, or for a :class:`LookedUpFront` the ids' rows, float [B, K, P], with
the lengths of the sequences, int [B, sequences], if there are sequences."""


class SequenceField(Protocol):
    """A field whose ids have an order. Each id is looked up by itself."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the L positions. A position has at most one id of a sample; the last one has the newest id."""

    @property
    def shares(self) -> str:
        """Field whose table the sequence shares, such as the scored item for a history of items; "" for none."""

    @property
    def along(self) -> str:
        """Sequence whose ids this sequence describes one by one, so that both have one mask; "" for none."""


class SequenceRows(NamedTuple):
    """Rows of a sequence field."""

    rows: Tensor
    """Float [B, L, P], the newest last. Positions before the ids of a shorter sequence have zeros."""
    mask: Tensor
    """True where the sequence has an id, bool [B, L]."""


def physical_dim(embedding_dim: int) -> int:
    """Stored width P of a table: the smallest multiple of 4 that holds D columns and the wide weight.

    Columns [0, D) are the embedding, and column D is the wide weight, so that one lookup serves both. Further columns
    have zero gradients and stay zero if they are initialised to zero. FBGEMM's fused tables need a multiple of 4.
    """
    return (embedding_dim // 4 + 1) * 4


class Features(NamedTuple):
    """Inputs of a network."""

    rows: Tensor
    """Looked-up rows, float [B, F, P], fields in the order of the tables. The first D columns are the embeddings;
    embeddings of another width are projected to D. The row of a sequence is the mean of the sequence's rows."""
    wide: Tensor
    """Sum of each sample's wide weights, float [B]."""
    flat: Tensor
    """All embeddings, field-major, then the dense features: [B, F * D + N], under autocast in its dtype."""
    sequences: Mapping[str, SequenceRows]
    """Rows of the sequences, by field."""
    padded: Tensor | None = None
    """``flat`` with columns of zeros up to a multiple of 8, in the memory of ``flat``, without a gradient. It exists on
    CUDA alone, and only if the width is not such a multiple. Products in TF32 and bfloat16 are fast where rows begin at
    multiples of 16 bytes."""
    pairs: Tensor | None = None
    """Sum of the inner products of all pairs of fields, float [B], where a kernel reads the rows; else None."""


class EmbeddingFront(nn.Module):
    """Embedding tables, one per field or group of fields, and the dense features beside them.

    Args:
        tables: tables of width ``physical_dim(d)``, where d is the width of their fields. Their feature names are the
            fields, and the keys of sequences.
        embedding_dim: D, to which embeddings of other widths are projected.
        num_dense: N, may be 0.
        embedding_dims: d of the fields whose width is not D.
        is_weighted: whether the ids have weights; all tables are then pooled by sum.
        fields: fields in the order in which the network gets them; by default in the order of the tables.
        sequences: fields that are sequences, by name; ``fields`` lists them too.
        device: device of the tables; on the meta device, sharding allocates them.

    Raises ValueError: no tables, or a table of another width than the model needs.
    """

    def __init__(
        self,
        tables: Sequence["EmbeddingBagConfig"],
        embedding_dim: int,
        num_dense: int,
        *,
        embedding_dims: Mapping[str, int] | None = None,
        is_weighted: bool = False,
        fields: Sequence[str] | None = None,
        sequences: Mapping[str, SequenceField] | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        # A network whose rows are looked up elsewhere does without TorchRec, which takes seconds to import.
        from torchrec.modules.embedding_modules import EmbeddingBagCollection

        if not tables:
            raise UserError(
                "a model needs at least one sparse field, got none; in the schema file, give one of ids (kind = "
                '"categorical"), or a numeric field transform = "buckets", and prepare again'
            )
        dims, self.sequences = dict(embedding_dims or {}), dict(sequences or {})
        _require_one_width(self.sequences, lambda field: dims.get(field, embedding_dim))
        fields_of = {key: name for name, sequence in self.sequences.items() for key in sequence.keys}
        for table in tables:
            for field in (fields_of.get(feature, feature) for feature in table.feature_names):
                width, key = dims.get(field, embedding_dim), f"embedding_dim{f's.{field}' if field in dims else ''}"
                if table.embedding_dim != physical_dim(width):
                    raise UserError(
                        f"table {table.name} is {table.embedding_dim} wide, but {key} = {width} needs "
                        f"physical_dim({width}) = {physical_dim(width)}"
                    )
        self.fields = list(fields or (field for table in tables for field in table.feature_names))
        self.embedding_dim = embedding_dim
        self.num_dense = num_dense
        self.width = len(self.fields) * embedding_dim + num_dense
        self.embeddings = EmbeddingBagCollection(tables=list(tables), is_weighted=is_weighted, device=device)
        widths = [dims.get(field, embedding_dim) for field in self.fields]
        self.layout = _Layout(self.fields, widths, embedding_dim, self.sequences)

    def forward(self, dense: Tensor, sparse: "KeyedJaggedTensor") -> Features:
        features: Features = self.layout(self.embeddings(sparse), dense, sparse)
        return features


class LookedUpFront(nn.Module):
    """Replacement of an :class:`EmbeddingFront` for rows that are looked up elsewhere, as in serving.

    ``widths`` are d of each field, ``row_width`` is P of the widest rows, and ``num_keys`` is K.
    """

    def __init__(
        self,
        fields: Sequence[str],
        widths: Sequence[int],
        embedding_dim: int,
        num_dense: int,
        sequences: Mapping[str, SequenceField] | None = None,
    ) -> None:
        super().__init__()
        self.fields, self.sequences = list(fields), dict(sequences or {})
        self.embedding_dim = embedding_dim
        self.num_dense = num_dense
        self.width = len(widths) * embedding_dim + num_dense
        self.row_width = physical_dim(max(widths))
        self.layout = _Layout(self.fields, widths, embedding_dim, self.sequences)
        self.num_keys = len(self.layout.keys)

    def forward(self, dense: Tensor, sparse: "Tensor | tuple[Tensor, Tensor]") -> Features:
        """Makes features of dense features [B, N] and pooled rows [B, K, P], whose keys are in the order of the fields.

        With sequences, the input is (rows, lengths of the sequences, int [B, sequences]), and rows of positions without
        an id are zeros. Columns beyond the width of a narrower row may have any values.
        """
        rows, lengths = (sparse, None) if isinstance(sparse, Tensor) else sparse
        features: Features = self.layout(rows, dense, lengths)
        return features


Front = EmbeddingFront | LookedUpFront


class _Layout(nn.Module):
    """Converts the looked-up rows to a network's features.

    A module is one operation for TorchRec's pipeline, which traces the code that calls the tables.
    """

    def __init__(
        self,
        fields: Sequence[str],
        widths: Sequence[int],
        embedding_dim: int,
        sequences: Mapping[str, SequenceField],
    ) -> None:
        super().__init__()
        _require_one_width(sequences, dict(zip(fields, widths, strict=True)).__getitem__)
        self._embedding_dim = embedding_dim
        keys = [sequences[field].keys if field in sequences else (field,) for field in fields]
        self.keys = [key for of_field in keys for key in of_field]
        self._sizes = [len(of_field) for of_field in keys]
        self._sequences = {field: number for number, field in enumerate(fields) if field in sequences}
        owners = [(sequences[field].shares if field in sequences else "") or field for field in fields]
        of_fields = zip(owners, widths, self._sizes, strict=True)
        of_keys = [(owner, width) for owner, width, size in of_fields for _ in range(size)]
        is_mixed = any(width != embedding_dim for width in widths)
        self.projections = Projections(of_keys, embedding_dim) if is_mixed else None

    def forward(
        self, looked_up: "KeyedTensor | Tensor", dense: Tensor, present: "KeyedJaggedTensor | Tensor | None"
    ) -> Features:
        rows = self._rows(looked_up)
        if not self._sequences:
            return _features(rows, dense, self._embedding_dim, {})
        assert present is not None, "rows of sequences come with their lengths"
        parts = list(rows.split(self._sizes, 1))
        sequences = {}
        for index, (field, number) in enumerate(self._sequences.items()):
            own, mask = parts[number], self._mask(present, index, number)
            sequences[field] = SequenceRows(own, mask)
            parts[number] = own.sum(1, keepdim=True) / mask.sum(1).clamp(min=1)[:, None, None]
        return _features(torch.cat(parts, 1), dense, self._embedding_dim, sequences)

    def _mask(self, present: "KeyedJaggedTensor | Tensor", index: int, number: int) -> Tensor:
        """True where a sequence has ids, bool [B, L], by its index among the sequences and its number as a field."""
        size = self._sizes[number]
        if isinstance(present, Tensor):
            position = torch.arange(size, device=present.device)
            return position >= size - present[:, index, None]
        first = sum(self._sizes[:number])
        output: Tensor = present.lengths().view(len(self.keys), -1)[first : first + size].t() > 0
        return output

    def _rows(self, looked_up: "KeyedTensor | Tensor") -> Tensor:
        if isinstance(looked_up, Tensor):
            return looked_up if self.projections is None else self.projections(looked_up.unbind(1))
        if self.projections is None and looked_up.keys() == self.keys:
            output: Tensor = looked_up.values().unflatten(1, (len(self.keys), -1))
            return output
        by_field = looked_up.to_dict()  # in another order, by the sharding plan
        rows = [by_field[key] for key in self.keys]
        return torch.stack(rows, dim=1) if self.projections is None else self.projections(rows)


def _require_one_width(sequences: Mapping[str, SequenceField], width: Callable[[str], int]) -> None:
    for name, sequence in sequences.items():
        if sequence.shares and width(name) != width(sequence.shares):
            raise UserError(
                f"the sequence {name!r} shares the table of {sequence.shares!r}, but their embeddings are"
                f" {width(name)} and {width(sequence.shares)} wide; give both one width in model.embedding_dims"
            )


class Projections(nn.Module):
    """A linear map without bias from d to D for each field whose d is not D; other embeddings stay as they are.

    ``keys`` has, for each key, the field whose map the key uses, and d. All keys of a sequence use one map, that of the
    field whose table the sequence shares. ``kernels`` are float [fields, d, D] by d, in the order of the keys.
    Source: Mixed Dimension Embeddings (arXiv 1909.11810), with one block for each field.
    """

    order: Tensor

    def __init__(self, keys: Sequence[tuple[str, int]], embedding_dim: int) -> None:
        super().__init__()
        self._embedding_dim = embedding_dim
        widths = dict.fromkeys(width for _, width in keys)
        self._keys = {d: [number for number, (_, width) in enumerate(keys) if width == d] for d in widths}
        self.kernels = nn.ParameterDict()
        for d, numbers in self._keys.items():
            if d != embedding_dim:
                owners = [keys[number][0] for number in numbers]
                fields = [*dict.fromkeys(owners)]
                self.kernels[str(d)] = torch.stack([glorot_normal(d, embedding_dim).detach() for _ in fields])
                kernel_of = torch.tensor([fields.index(owner) for owner in owners])
                self.register_buffer(
                    f"_kernel_of_{d}", kernel_of if len(fields) < len(owners) else None, persistent=False
                )
        grouped = torch.tensor([number for numbers in self._keys.values() for number in numbers])
        self.register_buffer("order", grouped.argsort(), persistent=False)

    def forward(self, rows: Sequence[Tensor]) -> Tensor:
        """Maps each key's rows [B, d + 1 or more], embeddings and wide weights, to [B, K, D + 1]."""
        groups = []
        for d, numbers in self._keys.items():
            group = torch.stack([rows[number] for number in numbers], dim=1)
            if d == self._embedding_dim:
                groups.append(group[:, :, : d + 1])
                continue
            kernel, kernel_of = cast(Tensor, self.kernels[str(d)]), getattr(self, f"_kernel_of_{d}")
            kernel = kernel if kernel_of is None else kernel[kernel_of]
            embeddings = torch.einsum("bfi,fij->bfj", group[:, :, :d], kernel).to(group.dtype)
            groups.append(torch.cat([embeddings, group[:, :, d : d + 1]], dim=2))
        return torch.cat(groups, dim=1).index_select(1, self.order)


def _features(rows: Tensor, dense: Tensor, embedding_dim: int, sequences: Mapping[str, SequenceRows]) -> Features:
    kind = rows.device.type
    dtype = torch.promote_types(rows.dtype, dense.dtype)
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    if uses_kernels(rows) and dtype.itemsize <= 4:
        wide, pairs, flat = _OnDevice.apply(rows.contiguous(), dense, embedding_dim, dtype)
        width = _padded_width(flat.shape[1])
        padded = flat.detach().as_strided((len(rows), width), (width, 1)) if flat.stride(0) > flat.shape[1] else None
        return Features(rows, wide, flat, sequences, padded, pairs)
    if compiles(rows, dense):
        wide, pairs, flat = _OnCpu.apply(rows, dense, embedding_dim)
        return Features(rows, wide, flat if flat.dtype == dtype else flat.to(dtype), sequences, None, pairs)
    # For the few samples of a request, the time depends on the number of operations, which is small here.
    flat = torch.cat((rows.narrow(2, 0, embedding_dim).flatten(1), dense), 1)
    flat = flat if flat.dtype == dtype else flat.to(dtype)
    return Features(rows, rows.sum(1).select(1, embedding_dim), flat, sequences)


def compiles(*inputs: Tensor) -> bool:
    """True if numba's kernels compute on CPU: in float32 in training, except for what torch compiles or exports."""
    elsewhere = torch.compiler.is_compiling() or torch.compiler.is_exporting() or torch.jit.is_tracing()
    in_float32 = all(tensor.dtype == torch.float32 and tensor.device.type == "cpu" for tensor in inputs)
    return in_float32 and not (elsewhere or torch.is_inference_mode_enabled())


class _OnCpu(torch.autograd.Function):
    """``wide``, ``pairs`` and ``flat`` of :class:`Features` in one pass over the rows, and one in the backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, dense: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
        from .numba_layers import features_on_cpu

        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows)
        ctx.dim = dim
        return features_on_cpu(rows, dense, dim)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor | None, None]:
        from .numba_layers import features_backward_on_cpu

        (rows,), grad_flat, grad_dense = ctx.saved_tensors, grads[2], None
        if ctx.needs_input_grad[1] and grad_flat is not None:
            grad_dense = grad_flat[:, rows.shape[1] * ctx.dim :]
        return features_backward_on_cpu(rows, ctx.dim, *grads), grad_dense, None


def _padded_width(columns: int) -> int:
    return -(-columns // 8) * 8


class _OnDevice(torch.autograd.Function):
    """``wide``, ``pairs`` and ``flat`` of :class:`Features` in one pass over the rows, and one in the backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, dense: Tensor, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        from .triton_layers import features_on_device

        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows)
        ctx.dim, ctx.dense_dtype, columns = dim, dense.dtype, rows.shape[1] * dim + dense.shape[1]
        wide, pairs, padded = features_on_device(rows, dense, dim, _padded_width(columns), dtype)
        # Not a view, which a network could not change in place.
        flat = padded.new_empty(0).set_(padded.untyped_storage(), 0, (len(rows), columns), padded.stride())
        return wide, pairs, flat

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor | None, None, None]:
        from .triton_layers import features_backward_on_device

        (rows,), grad_flat, grad_dense = ctx.saved_tensors, grads[2], None
        if ctx.needs_input_grad[1] and grad_flat is not None:
            grad_dense = grad_flat[:, rows.shape[1] * ctx.dim :].to(ctx.dense_dtype)
        return features_backward_on_device(rows, ctx.dim, *grads), grad_dense, None, None
