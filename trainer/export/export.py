"""Export of a trained model to the files of :mod:`.manifest`, which suffice for predictions and contain no code."""

import io
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from cowrec.data_pipeline import RESERVED_ROWS, Schema
from cowrec.data_pipeline.dataset.schema import library_versions
from cowrec.data_pipeline.dataset.shards import new_folder
from cowrec.data_pipeline.remote import Place
from cowrec.errors import UserError
from cowrec.files import write_file
from cowrec.models import ModelConfig, build_network, physical_dim
from cowrec.models.own_code import is_import_path
from cowrec.sparse_opt import IdTables

from ..runs.checkpoint_files import checksums
from ..runs.local_copy import local_copy, written_folder
from ..runs.run_dir import VOCABULARY, own_code
from ..runtime.environment import launched_world_size
from ..runtime.processes import process_group
from ..sharded_model.build import dense_tensors, gathered_table, tables_of
from ..sharded_model.run_plan import TableSpec
from ..training.saved_run import run_of, trained_state
from .manifest import DENSE, MANIFEST, NETWORK, TABLES, Manifest, Precision, TableManifest, dequantise, quantise

_PROBE_SAMPLES = 4096


@dataclass(frozen=True)
class TrainedTable:
    """One table to export.

    Attributes:
        name: of its file.
        features, hash_buckets: as in :class:`TableManifest`.
        rows: float32 [n, P].
        ids: int64 [n], raw ids of the rows of a collisionless table, including the reserved rows 0 and 1; None for a
            table whose rows are numbered from 0.
        feature: int64 [n] where several fields share a collisionless table: index in ``features`` of each row's field.
    """

    name: str
    features: tuple[str, ...]
    rows: Tensor
    ids: Tensor | None = None
    feature: Tensor | None = None
    hash_buckets: int = 0


def export_run(run_dir: Place, output: Place, precision: Precision = "float32", *, checkpoint: str = "") -> Manifest:
    """Exports a run's model with the weights of a checkpoint, as :func:`evaluate_run` takes it, in one process.

    ``output`` is a path, or the URI of a folder in an object store, in which the manifest appears last.

    Raises:
        UserError: ``run_dir`` is not a run or has no usable checkpoint, ``output`` is not empty, a weight cannot be
            represented in the precision, or there are several processes.
        OSError: the disk is full; no file is left behind.
    """
    if launched_world_size() > 1:
        raise UserError("export supports a single process only; start it without torchrun")
    run_dir = local_copy(run_dir, "run")
    config, schema = run_of(run_dir)
    with process_group(config.train.device) as process:
        state, progress = trained_state(run_dir, (config, schema), process, checkpoint)
        weights = tables_of(state.model)

        def table(spec: TableSpec) -> TrainedTable:
            rows = gathered_table(weights[spec.name], process).cpu()
            if spec.ids.kind != "collisionless":
                return trained_table(spec, rows)
            assert state.id_tables is not None
            columns = rows_and_ids(spec, state.id_tables)
            return trained_table(spec, rows[columns[0]], columns)

        tables = (table(spec) for spec in state.plan.tables)
        dense, vocabulary = dense_weights(state.model), run_dir / VOCABULARY
        with written_folder(output, last=MANIFEST) as folder:
            model = (config.model, schema, vocabulary, dense, tables, precision)
            return write_export(folder, *model, step=progress.step)


def rows_and_ids(spec: TableSpec, id_tables: IdTables, *, reserved: bool = True) -> Tensor:
    """Rows of a collisionless table that belong to ids of this process, their ids, and the numbers of their fields.

    Int64 [3, n]; with ``reserved`` the reserved rows, whose ids are 0 and 1, come first.
    """
    entries, first = id_tables.entries(spec.name), np.arange(RESERVED_ROWS if reserved else 0)
    columns = ((first, entries.row), (first, entries.id), (np.zeros_like(first), entries.feature))
    return torch.from_numpy(np.stack([np.concatenate(parts) for parts in columns]))


def trained_table(spec: TableSpec, rows: Tensor, columns: Tensor | None = None) -> TrainedTable:
    """Makes a table to export of its rows, float32 [n, P].

    Rows of a collisionless table are those that belong to ids, with their ``columns`` of :func:`rows_and_ids`.
    """
    features, hashed = tuple(field.name for field in spec.fields), spec.ids.kind == "hash"
    if columns is None:
        return TrainedTable(spec.name, features, rows, hash_buckets=spec.ids.capacity if hashed else 0)
    _, ids, numbers = (column.clone() for column in columns)  # a file cannot have tensors that share memory
    return TrainedTable(spec.name, features, rows, ids, numbers if len(features) > 1 else None)


def dense_weights(model: nn.Module) -> dict[str, Tensor]:
    """Weights of a training model without its tables, by their names in ``build_network``'s module, on the CPU."""
    return {name.partition("model.")[2]: value.detach().cpu() for name, value in dense_tensors(model).items()}


def write_export(
    output: Path,
    config: ModelConfig,
    schema: Schema,
    vocabulary: Path,
    dense: Mapping[str, Tensor],
    tables: Iterable[TrainedTable],
    precision: Precision = "float32",
    *,
    step: int,
    sample_time: int | None = None,
) -> Manifest:
    """Writes an export; the folder appears complete or not at all.

    Args:
        vocabulary: folder with the vocabularies of fields; it need not exist.
        dense: the network's weights, from :func:`dense_weights`.
        tables: consumed one by one, so that only one has to be in memory.

    Raises:
        UserError: ``output`` is not empty, or a weight cannot be represented in the precision.
        OSError: the disk is full; no file is left behind.
    """
    network, probe = _trained_network(config, schema, dense), _Probe(schema, config)
    with new_folder(output) as folder:
        (folder / TABLES).mkdir()
        described = {table.name: _write_table(folder, table, precision, probe) for table in tables}
        # A file cannot have tensors that share memory, as a layer does that a network has under two names.
        own = {key: value.clone(memory_format=torch.contiguous_format) for key, value in dense.items()}
        write_file(folder / DENSE, safetensors.torch.save(own))
        program = exported_network(network, config, schema)
        content = io.BytesIO()
        torch.export.save(program, content)
        write_file(folder / NETWORK, content.getvalue())
        schema.save(folder)
        if vocabulary.is_dir():
            shutil.copytree(vocabulary, folder / VOCABULARY)
        manifest = Manifest(
            config,
            precision,
            described,
            probe.logits_error(network, program.module()),
            step,
            sample_time,
            checksums(folder, filter(Path.is_file, folder.rglob("*"))),
            library_versions() | {"torch": torch.__version__},
            own_code("model.name", config.name) if is_import_path(config.name) else None,
        )
        manifest.save(folder)
    return manifest


def exported_network(network: nn.Module, config: ModelConfig, schema: Schema) -> torch.export.ExportedProgram:
    """Exports a network as plain torch operators, ``(dense [B, N], rows [B, F, P]) -> logits [B]``, for any B.

    With sequences, ``(rows [B, K, P], lengths [B, sequences])`` takes the place of the rows; see `build_network`.

    Raises UserError: torch cannot export a network of the user's own.
    """
    samples = torch.export.Dim("samples")
    rows, any_samples = torch.zeros(3, len(schema.keys), _row_width(config, schema)), {0: samples}
    looked_up: Any = _with_lengths(rows, schema)
    shapes: Any = any_samples if looked_up is rows else (any_samples, any_samples)
    try:
        with torch.no_grad():
            example = (torch.zeros(3, len(schema.dense)), looked_up)
            return torch.export.export(network, example, dynamic_shapes=(any_samples, shapes))
    except Exception as error:
        if not is_import_path(config.name):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f'model.name = "{config.name}" cannot be exported by torch.export ({type(error).__name__}: {reason}); its'
            " forward must not depend on the values of tensors or the number of samples, other than by operations on"
            " tensors"
        ) from error


def _trained_network(config: ModelConfig, schema: Schema, dense: Mapping[str, Tensor]) -> nn.Module:
    # Building draws initial values, which must not change the random numbers of a run.
    with torch.random.fork_rng(devices=[]):
        network = build_network(config, _fields(schema), len(schema.dense), len(schema.labels), schema.sequences).eval()
    network.load_state_dict(dict(dense))
    if schema.logit_shift:
        network.register_forward_hook(lambda module, inputs, logits: logits + schema.logit_shift)
    return network


def _fields(schema: Schema) -> list[str]:
    return [field.name for field in schema.sparse]


def _with_lengths(rows: Tensor, schema: Schema) -> Tensor | tuple[Tensor, Tensor]:
    """Rows [B, K, P] as networks take them: of sequences with lengths, here the largest ones."""
    lengths = [sequence.max_length for sequence in schema.sequences.values()]
    return (rows, torch.tensor(lengths).repeat(len(rows), 1)) if lengths else rows


def _row_width(config: ModelConfig, schema: Schema) -> int:
    """P of the widest rows."""
    return physical_dim(max(config.widths(_fields(schema))))


def _write_table(folder: Path, table: TrainedTable, precision: Precision, probe: "_Probe") -> TableManifest:
    stored = quantise(table.rows, precision)
    restored = dequantise(**stored)
    error = float((restored - table.rows).abs().max()) if table.rows.numel() else 0.0
    probe.add(table, restored)
    columns = {"ids": table.ids, "feature": table.feature}
    stored |= {key: value.contiguous() for key, value in columns.items() if value is not None}
    write_file(folder / TABLES / f"{table.name}.safetensors", safetensors.torch.save(stored))
    return TableManifest(table.features, len(table.rows), table.ids is not None, error, table.hash_buckets)


class _Probe:
    """Random samples, the same for every export, on which logits of trained and of stored rows are compared."""

    def __init__(self, schema: Schema, config: ModelConfig) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._dense = torch.rand(_PROBE_SAMPLES, len(schema.dense), generator=self._generator)
        self._schema = schema
        shape = (_PROBE_SAMPLES, len(schema.keys), _row_width(config, schema))
        self._trained, self._stored = torch.zeros(shape), torch.zeros(shape)

    def add(self, table: TrainedTable, restored: Tensor) -> None:
        owners = [field.vocabulary for field in self._schema.sparse for _ in field.keys]
        for index in [index for index, owner in enumerate(owners) if owner in table.features]:
            rows = torch.randint(len(table.rows), (_PROBE_SAMPLES,), generator=self._generator)
            columns = slice(table.rows.shape[1])
            self._trained[:, index, columns] = table.rows[rows]
            self._stored[:, index, columns] = restored[rows]

    def logits_error(self, network: nn.Module, program: nn.Module) -> float:
        with torch.no_grad():
            trained, stored = (_with_lengths(rows, self._schema) for rows in (self._trained, self._stored))
            difference = network(self._dense, trained) - program(self._dense, stored)
        return float(difference.abs().max())
