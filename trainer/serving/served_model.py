"""A served model: predicts from an export, and applies published versions at the same time."""

import dataclasses
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cowrec.data_pipeline.dataset.sample_block import SampleBlock
from cowrec.data_pipeline.dataset.schema import Schema
from cowrec.models import build_network, physical_dim
from cowrec.sparse_opt import id_bucket_rows
from cowrec.trainer.export.manifest import DENSE, TABLES, Manifest
from cowrec.trainer.publishing.blob import Blob, TableChange
from cowrec.trainer.runs.own_code import find_code, warn_if_changed

from .served_rows import ServedRows


@dataclass(frozen=True)
class _State:
    """Attributes that are replaced together."""

    network: nn.Module
    version: int
    lineage: str
    step: int
    sample_time: int | None


class ServedModel:
    """Predicts in any number of threads while another one applies versions; created by :meth:`load`.

    Attributes:
        schema: of the samples.
        manifest: of the export.
    """

    def __init__(self, manifest: Manifest, schema: Schema, dense: Mapping[str, Tensor]) -> None:
        self.manifest, self.schema = manifest, schema
        self._number = {field.name: number for number, field in enumerate(schema.sparse)}
        table_of, sizes = np.full(len(schema.sparse), -1), np.empty(len(schema.sparse), np.int64)
        for number, table in enumerate(manifest.tables.values()):
            for feature in table.features:
                table_of[self._number[feature]] = number
                sizes[self._number[feature]] = -1 if table.collisionless else table.rows
        if (table_of < 0).any():
            raise ValueError(
                f"field {schema.sparse[int(table_of.argmin())].name!r} has no table; export the model again"
            )
        self._buckets = {
            feature: (table.hash_buckets, index)
            for table in manifest.tables.values()
            for index, feature in enumerate(table.features)
            if table.hash_buckets
        }
        self._fields_served = [field.name for field in schema.sparse]
        self._widths = [physical_dim(width) for width in manifest.model.widths(self._fields_served)]
        self._rows = ServedRows(schema, sizes, table_of, np.array(self._widths), manifest.precision)
        self._state = _State(self._network(dense), 0, "", manifest.step, manifest.sample_time)
        self._applying, self._counting = threading.Lock(), threading.Lock()
        self._unknown_ids = self._applied_rows = self._removed_rows = 0

    @staticmethod
    def load(export_dir: Path) -> "ServedModel":
        """Loads an export. No code from the folder runs: the network is cowrec's own, or a class that is on Python's
        path here or in the current folder, and only its weights are read.

        Raises:
            ValueError: the folder is not an export, a file in it is damaged, or the network cannot be imported.
        """
        manifest = Manifest.load(export_dir)
        code = [manifest.code] if manifest.code else []
        find_code(code, export_dir, trusted=False)
        model = ServedModel(manifest, Schema.load(export_dir), safetensors.torch.load_file(export_dir / DENSE))
        warn_if_changed(code, export_dir)
        for name, table in manifest.tables.items():
            stored = safetensors.torch.load_file(export_dir / TABLES / f"{name}.safetensors")
            ids = stored["ids"].numpy() if "ids" in stored else np.arange(table.rows)
            feature = stored["feature"].numpy() if "feature" in stored else None
            model._rows.load(ids, model._fields(name, len(ids), feature), stored["rows"], stored.get("scale"))
        return model

    @property
    def version(self) -> int:
        """Published version that is served; 0 for the export."""
        return self._state.version

    @property
    def step(self) -> int:
        """Training steps of the model."""
        return self._state.step

    @property
    def sample_time(self) -> int | None:
        """Newest sample trained on, Unix seconds; None if samples have no time."""
        return self._state.sample_time

    def predict(self, samples: SampleBlock) -> NDArray[np.float32]:
        """Click probabilities, [B] or [B, T] of T > 1 tasks, of encoded samples on the CPU; labels are ignored."""
        looked_up, unknown = self._rows.gather(self._with_bucket_rows(samples) if self._buckets else samples)
        with self._counting:
            self._unknown_ids += unknown
        with torch.inference_mode():
            return (self._state.network(samples.dense, looked_up) + self.schema.logit_shift).sigmoid().numpy()

    def apply(self, blob: Blob) -> None:
        """Updates the model to a published version; meanwhile predictions see rows from before and after.

        The network's weights are replaced together at the end.

        Raises:
            ValueError: a delta that is not based on the served version, or a version of another model; nothing is
                changed.
        """
        with self._applying:
            now, change = self._state, blob.change
            if blob.kind == "delta" and (blob.previous, blob.lineage) != (now.version, now.lineage):
                raise ValueError(
                    f"delta {blob.version} is based on version {blob.previous} of lineage {blob.lineage!r}, but version"
                    f" {now.version} of lineage {now.lineage!r} is served; apply a full version"
                )
            if blob.kind == "full" and (not change.dense or self.manifest.tables.keys() - change.tables.keys()):
                lacking = sorted(self.manifest.tables.keys() - change.tables.keys())
                raise ValueError(f"a full version lacks {', '.join(lacking) or 'the dense weights'}; publish it again")
            for name, table in change.tables.items():
                self._check(name, table)
            network = (
                self._network({name: torch.tensor(each) for name, each in change.dense.items()})
                if change.dense
                else now.network
            )
            # Until this is complete, only a full version could be applied.
            self._state = _State(now.network, now.version, "", now.step, now.sample_time)
            removed = 0
            for name, table in change.tables.items():
                fields = self._fields(name, len(table.ids), table.feature)
                self._rows.write(table.ids, fields, table.rows)
                removed += self._rows.remove(
                    table.deleted, self._fields(name, len(table.deleted), table.deleted_feature)
                )
            if blob.kind == "full":
                removed += self._keep_only(change.tables)
            self._state = _State(network, blob.version, blob.lineage, change.step, change.sample_time)
            with self._counting:
                self._applied_rows += change.num_rows
                self._removed_rows += removed

    def counters(self) -> dict[str, int]:
        """Ids that had no row of their own, rows written and removed, all since the start; ids that have a row now."""
        with self._counting:
            return {
                "unknown_ids": self._unknown_ids,
                "applied_rows": self._applied_rows,
                "removed_rows": self._removed_rows,
                "resident_ids": self._rows.resident,
            }

    def _with_bucket_rows(self, samples: SampleBlock) -> SampleBlock:
        """Replaces ids of hashed fields by their rows."""
        ids, bags = samples.ids.clone(), dict(samples.bags)
        singles = [field.name for field in self.schema.sparse if field.kind == "categorical"]
        for field, bucketing in self._buckets.items():
            if field in bags:
                values = id_bucket_rows(bags[field].values.numpy().astype(np.int64), *bucketing)
                bags[field] = dataclasses.replace(bags[field], values=torch.from_numpy(values))
            else:
                column = ids[:, singles.index(field)]
                column.copy_(torch.from_numpy(id_bucket_rows(column.numpy().astype(np.int64), *bucketing)))
        return dataclasses.replace(samples, ids=ids, bags=bags)

    def _network(self, dense: Mapping[str, Tensor]) -> nn.Module:
        network = build_network(
            self.manifest.model, self._fields_served, len(self.schema.dense), len(self.schema.labels)
        ).eval()
        try:
            network.load_state_dict(dict(dense))
        except RuntimeError as error:
            raise ValueError(
                f"the dense weights do not fit the served network, a {self.manifest.model.name}: {error}"
            ) from error
        for name, value in network.state_dict().items():
            if not value.isfinite().all():
                raise ValueError(f"the dense weights {name!r} are not finite; the training has diverged")
        return network.requires_grad_(False)

    def _fields(self, table: str, count: int, feature: NDArray[np.int64] | None) -> NDArray[np.int64]:
        """Number of the field that each of a table's ids belongs to, int64 [count]."""
        numbers = np.array([self._number[each] for each in self.manifest.tables[table].features], np.int64)
        return np.full(count, numbers[0]) if feature is None else numbers[feature]

    def _keep_only(self, tables: Mapping[str, TableChange]) -> int:
        names = [name for name in tables if self.manifest.tables[name].collisionless]
        if not names:
            return 0
        fields = [self._fields(name, len(tables[name].ids), tables[name].feature) for name in names]
        return self._rows.remove_others(np.concatenate([tables[name].ids for name in names]), np.concatenate(fields))

    def _check(self, name: str, change: TableChange) -> None:
        """Raises ValueError if a change does not fit this model's table."""
        table = self.manifest.tables.get(name)
        width = self._widths[self._number[table.features[0]]] if table else None
        if table is None or change.rows.shape[1] != width:
            known = "it has no such table" if table is None else f"its width is {width}"
            raise ValueError(f"the model has no table {name!r} with rows of width {change.rows.shape[1]}; {known}")
        largest = torch.finfo(torch.float16 if self.manifest.precision == "float16" else torch.float32).max
        if not (np.abs(change.rows) <= largest).all():
            precision = self.manifest.precision
            raise ValueError(f"rows of table {name!r} are not finite numbers in {precision}; the training has diverged")
        if table.collisionless:
            served = len(table.features)
            given = [each for each in (change.feature, change.deleted_feature) if each is not None]
            if bool(given) != (served > 1) or any(((each < 0) | (each >= served)).any() for each in given):
                raise ValueError(f"table {name!r} serves {served} fields, but its change has others")
        elif len(change.deleted) or (len(change.ids) and not 0 <= change.ids.min() <= change.ids.max() < table.rows):
            raise ValueError(
                f"table {name!r} has exactly the rows 0 to {table.rows - 1}, but its change deletes or writes others"
            )
