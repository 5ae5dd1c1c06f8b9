"""Embedding tables of a run: their fields, sizes, initial values, and their tensors in a sharded model."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import unquote

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType

from cowrec.data_pipeline import RESERVED_ROWS, Schema, SparseField
from cowrec.data_pipeline.dataset.schema import escaped_name
from cowrec.errors import UserError
from cowrec.models import physical_dim
from cowrec.names import hint
from cowrec.sparse_opt import rows_for

from ..config.run import RunConfig
from ..config.sections import IdConfig
from ..runtime.processes import Process

Value = TypeVar("Value")
_TAKEN = frozenset(dir(nn.ModuleDict()))


def table_name(name: str) -> str:
    """Name of the table of a field, or of the one that several share, in the model.

    It becomes an attribute of torch's modules, which have some themselves, such as ``type``.
    """
    return f"%{ord(name[0]):02X}{name[1:]}" if name in _TAKEN else escaped_name(name)


def shown_name(table: str) -> str:
    """Name of a table as the schema or the run's configuration has it; a very long one is cut."""
    return "" if table == escaped_name("") else unquote(table)


def by_table(settings: Mapping[str, Value]) -> dict[str, Value]:
    """Settings by the tables' names in the model, from those of the run's configuration."""
    return {table_name(name): value for name, value in settings.items()}


@dataclass(frozen=True)
class TableSpec:
    """Specification of one embedding table, from the data, `[id_table]` and `[model]`.

    Attributes:
        name: of the table, see :func:`table_name`.
        fields: fields whose ids the table holds; the ids of one are other rows than those of another.
        keys: the keys by which it is looked up: those of the fields, and of sequences that share one of them.
        ids: its `[id_table]` settings.
        num_embeddings: its rows, including the reserved rows.
        embedding_dim: width of its embeddings, without the wide weight.
    """

    name: str
    fields: tuple[SparseField, ...]
    keys: tuple[str, ...]
    ids: IdConfig
    num_embeddings: int
    embedding_dim: int


def table_specs(schema: Schema, config: RunConfig) -> list[TableSpec]:
    """Lists the tables of a run, in the order of their first fields.

    Raises:
        ValueError: an unknown table or field.
    """
    by_name = {field.name: field for field in schema.sparse}
    own = [field.name for field in schema.sparse if not field.shares]  # a history has the table of what it shares
    widths, specs = dict(zip(by_name, config.model.widths(list(by_name)), strict=True)), []
    for name, names in config.id_table.table_fields(own).items():
        fields, ids = tuple(by_name[each] for each in names), config.id_table.of_table(name)
        keys = tuple(key for field in schema.sparse if field.vocabulary in names for key in field.keys)
        specs.append(TableSpec(table_name(name), fields, keys, ids, _rows(fields, ids), widths[names[0]]))
    return specs


def _rows(fields: Sequence[SparseField], ids: IdConfig) -> int:
    if ids.kind == "rows":
        return fields[0].num_embeddings
    if ids.kind == "hash":
        return RESERVED_ROWS + ids.capacity
    return rows_for(ids.capacity)


def embedding_tables(schema: Schema, specs: Sequence[TableSpec]) -> list[EmbeddingBagConfig]:
    """Makes a TorchRec table for each spec, wide enough for the embedding and the wide weight."""
    return [
        EmbeddingBagConfig(
            name=spec.name,
            num_embeddings=spec.num_embeddings,
            embedding_dim=physical_dim(spec.embedding_dim),
            feature_names=list(spec.keys),
            # A weighted collection only sums; the reader then gives a mean-pooled field's ids the weight 1/length.
            pooling=(
                PoolingType.MEAN if spec.fields[0].pooling == "mean" and not schema.is_weighted else PoolingType.SUM
            ),
        )
        for spec in specs
    ]


def require_tables(key: str, names: Iterable[str], tables: Sequence[EmbeddingBagConfig]) -> None:
    """Raises ValueError, with the nearest name, for one of the names under a key that is not that of a table."""
    of_model = {table.name: shown_name(table.name) for table in tables}
    for name in names:
        if table_name(name) not in of_model:
            known = list(of_model.values())
            raise UserError(f"{key} names {name!r}, which is not a sparse field; {hint(name, known, 'sparse fields')}")


def fill_tables(model: nn.Module, specs: Sequence[TableSpec], std: float, seed: int) -> None:
    """Initializes the embedding columns with N(0, std) and the others with 0.

    Each block of rows is drawn from (seed, table, block), so that a row's values do not depend on the sharding.
    """
    widths = {spec.name: spec.embedding_dim for spec in specs}
    for name, table in tables_of(model).items():
        for shard, offsets in local_shards(table):
            _fill_shard(shard, offsets, name, widths[name], std, seed)


def tables_of(model: nn.Module) -> dict[str, ShardedTensor | Tensor]:
    """Tables by name; the model's ``state_dict`` first brings replayed rows up to date."""
    return {key.split(".")[-2]: value for key, value in model.state_dict().items() if ".embedding_bags." in key}


def local_shards(table: ShardedTensor | Tensor) -> list[tuple[Tensor, Sequence[int]]]:
    """Shards of a table on this rank, each with its first row and column; all of a data-parallel table."""
    if isinstance(table, ShardedTensor):
        return [(shard.tensor, shard.metadata.shard_offsets) for shard in table.local_shards()]
    return [(table.detach(), (0, 0))]


def gathered_table(table: ShardedTensor | Tensor, process: Process) -> Tensor:
    """Gathers a complete table on every process, or returns the only shard that it has."""
    if not isinstance(table, ShardedTensor):  # data-parallel
        return table.detach()
    if process.world_size == 1 and len(shards := table.local_shards()) == 1:
        return shards[0].tensor.detach()
    complete = torch.empty(table.size(), dtype=table.dtype, device=process.device)
    table.gather(0, complete if process.is_first else None)
    dist.broadcast(complete, 0)
    return complete


_BLOCK_ROWS = 1 << 12


def _fill_shard(rows: Tensor, offsets: Sequence[int], table: str, embedding_dim: int, std: float, seed: int) -> None:
    """Initializes the shard of a table whose first row and column are ``offsets``."""
    rows.zero_()
    first, first_column = offsets
    end = first + len(rows)
    generator = torch.Generator()
    for block in range(first // _BLOCK_ROWS, -(-end // _BLOCK_ROWS)):
        digest = hashlib.sha256(f"{seed}/{table}/{block}".encode()).digest()
        generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        # Always a full block: the first numbers that torch draws depend on how many are drawn.
        values = torch.randn(_BLOCK_ROWS, embedding_dim, generator=generator).mul_(std)
        start = block * _BLOCK_ROWS
        low, high = max(start, first), min(start + _BLOCK_ROWS, end)
        own = values[low - start : high - start, first_column : first_column + rows.shape[1]]
        rows[low - first : high - first, : own.shape[1]] = own
