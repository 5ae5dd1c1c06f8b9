"""A model that predicts from an export, and takes over what its trainer publishes while it does."""

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

from .served_rows import ServedRows


@dataclass(frozen=True)
class _State:
    """What is exchanged at once."""

    network: nn.Module
    version: int
    lineage: str
    step: int
    sample_time: int | None


class ServedModel:
    """Predicts; made by :meth:`load`. Predictions may be asked for in several threads while versions are applied.

    Attributes:
        schema: of the samples.
        manifest: of the export that it came from.
    """

    def __init__(self, manifest: Manifest, schema: Schema, dense: Mapping[str, Tensor]) -> None:
        self.manifest, self.schema = manifest, schema
        self._place = {field.name: number for number, field in enumerate(schema.sparse)}
        table_of, sizes = np.full(len(schema.sparse), -1), np.empty(len(schema.sparse), np.int64)
        for number, table in enumerate(manifest.tables.values()):
            for feature in table.features:
                table_of[self._place[feature]] = number
                sizes[self._place[feature]] = -1 if table.collisionless else table.rows
        if (table_of < 0).any():
            raise ValueError(
                f"field {schema.sparse[int(table_of.argmin())].name!r} has no table; export the model again"
            )
        self._buckets = {
            feature: (table.hash_buckets, place)
            for table in manifest.tables.values()
            for place, feature in enumerate(table.features)
            if table.hash_buckets
        }
        width = physical_dim(manifest.model.embedding_dim)
        self._rows = ServedRows(schema, sizes, table_of, width, manifest.precision)
        self._state = _State(self._network(dense), 0, "", manifest.step, manifest.sample_time)
        self._applying, self._counting = threading.Lock(), threading.Lock()
        self._unknown_ids = self._applied_rows = self._removed_rows = 0

    @staticmethod
    def load(export_dir: Path) -> "ServedModel":
        """The model of an export. Nothing in the folder is run: the network is this cowrec's, its weights are read.

        Raises:
            ValueError: the folder is no export, or a file in it is not what was written.
        """
        manifest = Manifest.load(export_dir)
        model = ServedModel(manifest, Schema.load(export_dir), safetensors.torch.load_file(export_dir / DENSE))
        for name, table in manifest.tables.items():
            stored = safetensors.torch.load_file(export_dir / TABLES / f"{name}.safetensors")
            ids = stored["ids"].numpy() if "ids" in stored else np.arange(table.rows)
            feature = stored["feature"].numpy() if "feature" in stored else None
            model._rows.load(ids, model._fields(name, len(ids), feature), stored["rows"], stored.get("scale"))
        return model

    @property
    def version(self) -> int:
        """Published version that is being served; 0 for the export."""
        return self._state.version

    @property
    def step(self) -> int:
        """Training steps that the model has taken."""
        return self._state.step

    @property
    def sample_time(self) -> int | None:
        """Newest sample trained on, Unix seconds; None where samples have no time."""
        return self._state.sample_time

    def predict(self, rows: SampleBlock) -> NDArray[np.float32]:
        """Click probabilities [B] of encoded samples on the CPU; their labels are not looked at."""
        looked_up, unknown = self._rows.gather(self._hashed(rows) if self._buckets else rows)
        with self._counting:
            self._unknown_ids += unknown
        with torch.inference_mode():
            return self._state.network(rows.dense, looked_up).sigmoid().numpy()

    def apply(self, blob: Blob) -> None:
        """Brings the model to a published version; predictions go on meanwhile, on rows of before and after.

        The network's weights are exchanged at once, at the end.

        Raises:
            ValueError: a delta that does not follow what is served, or a version of another model; nothing is changed.
        """
        with self._applying:
            now, change = self._state, blob.change
            if blob.kind == "delta" and (blob.previous, blob.lineage) != (now.version, now.lineage):
                raise ValueError(
                    f"version {blob.version} follows {blob.previous}, but {now.version} is served, or one of another"
                    " lineage; go on with a full version"
                )
            for name, table in change.tables.items():
                self._check(name, table)
            network = (
                self._network({name: torch.tensor(each) for name, each in change.dense.items()})
                if change.dense
                else now.network
            )
            # Should this be cut short, only a full version can follow.
            self._state = _State(now.network, now.version, "", now.step, now.sample_time)
            removed = 0
            for name, table in change.tables.items():
                fields = self._fields(name, len(table.ids), table.feature)
                self._rows.write(table.ids, fields, table.rows)
                removed += self._rows.remove(table.gone, self._fields(name, len(table.gone), table.gone_feature))
            if blob.kind == "full":
                removed += self._keep_only(change.tables)
            self._state = _State(network, blob.version, blob.lineage, change.step, change.sample_time)
            with self._counting:
                self._applied_rows += change.num_rows
                self._removed_rows += removed

    def counters(self) -> dict[str, int]:
        """Since the start: ids that had no row of their own, rows written and removed; and ids that have a row now."""
        with self._counting:
            return {
                "unknown_ids": self._unknown_ids,
                "applied_rows": self._applied_rows,
                "removed_rows": self._removed_rows,
                "resident_ids": self._rows.resident,
            }

    def _hashed(self, rows: SampleBlock) -> SampleBlock:
        """The samples with rows in the place of ids that are hashed."""
        ids, bags = rows.ids.clone(), dict(rows.bags)
        singles = [field.name for field in self.schema.sparse if field.kind == "categorical"]
        for field, how in self._buckets.items():
            if field in bags:
                values = id_bucket_rows(bags[field].values.numpy().astype(np.int64), *how)
                bags[field] = dataclasses.replace(bags[field], values=torch.from_numpy(values))
            else:
                column = ids[:, singles.index(field)]
                column.copy_(torch.from_numpy(id_bucket_rows(column.numpy().astype(np.int64), *how)))
        return dataclasses.replace(rows, ids=ids, bags=bags)

    def _network(self, dense: Mapping[str, Tensor]) -> nn.Module:
        network = build_network(self.manifest.model, len(self.schema.sparse), len(self.schema.dense)).eval()
        try:
            network.load_state_dict(dict(dense))
        except RuntimeError as error:
            raise ValueError(
                f"the weights are not those of a {self.manifest.model.name} of this size: {error}"
            ) from error
        return network.requires_grad_(False)

    def _fields(self, table: str, count: int, feature: NDArray[np.int64] | None) -> NDArray[np.int64]:
        """Number of the field that each of a table's ids belongs to, int64 [count]."""
        places = np.array([self._place[each] for each in self.manifest.tables[table].features], np.int64)
        return np.full(count, places[0]) if feature is None else places[feature]

    def _keep_only(self, tables: Mapping[str, TableChange]) -> int:
        names = [name for name in tables if self.manifest.tables[name].collisionless]
        if not names:
            return 0
        fields = [self._fields(name, len(tables[name].ids), tables[name].feature) for name in names]
        return self._rows.remove_others(np.concatenate([tables[name].ids for name in names]), np.concatenate(fields))

    def _check(self, name: str, change: TableChange) -> None:
        """Raises ValueError where a change is not one of this model's table."""
        table = self.manifest.tables.get(name)
        width = physical_dim(self.manifest.model.embedding_dim)
        if table is None or change.rows.shape[1] != width:
            raise ValueError(f"table {name!r} of rows {change.rows.shape[1]} wide is none of the model's, {width} wide")
        if table.collisionless:
            several = len(table.features)
            given = [each for each in (change.feature, change.gone_feature) if each is not None]
            if bool(given) != (several > 1) or any(((each < 0) | (each >= several)).any() for each in given):
                raise ValueError(f"table {name!r} serves {several} fields, and its change others")
        elif len(change.gone) or (len(change.ids) and not 0 <= change.ids.min() <= change.ids.max() < table.rows):
            raise ValueError(f"table {name!r} has the rows 0 to {table.rows - 1} for good, and its change others")
