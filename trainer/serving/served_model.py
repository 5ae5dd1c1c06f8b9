"""A served model: predicts from an export, and applies published versions at the same time."""

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor

from cowrec.data_pipeline.dataset.sample_block import SampleBlock
from cowrec.data_pipeline.dataset.schema import Schema
from cowrec.errors import UserError
from cowrec.models import build_network, physical_dim
from cowrec.models.own_code import search_also
from cowrec.sparse_opt import id_bucket_rows

from ..export.manifest import DENSE, TABLES, Manifest, fingerprint
from ..publishing.blob import Blob, TableChange
from ..runs.run_dir import warn_if_changed
from .inference_network import InferenceNetwork
from .row_kernels import Tables
from .served_rows import RowChange, ServedRows


@dataclass(frozen=True)
class ModelState:
    """What a prediction uses, of one version.

    Attributes:
        tables: those of each width, see :meth:`ServedRows.gather`.
        version: published version; 0 for the export.
        lineage: empty if only a full version can follow.
        step: training steps of the model.
        sample_time: newest sample trained on, Unix seconds; None if samples have no time.
    """

    tables: Sequence[Tables]
    network: InferenceNetwork
    version: int
    lineage: str
    step: int
    sample_time: int | None


class ServedModel:
    """Predicts in one thread at a time while another one applies versions; created by :meth:`load`.

    Each prediction uses one version throughout.

    Args:
        export_dir: folder of the export, whose fingerprint published versions must have.

    Attributes:
        state: what predictions use that begin now.
        unknown_ids: numbers of ids without a row of their own since the start, int64 by key; see `unknown_by_field`.
    """

    def __init__(self, manifest: Manifest, schema: Schema, export_dir: Path) -> None:
        self.manifest, self.schema, self._export_dir = manifest, schema, export_dir
        self.state: ModelState
        keys, served = list(schema.keys), [field.name for field in schema.sparse]
        self._number = {field.name: keys.index(field.keys[0]) for field in schema.sparse}
        described = list(manifest.tables.values())
        table_of_field = {feature: number for number, table in enumerate(described) for feature in table.features}
        table_of = np.array([table_of_field[field.vocabulary] for field in schema.sparse for _ in field.keys])
        sizes = np.array([-1 if table.collisionless else table.rows for table in described], np.int64)[table_of]
        buckets = {
            feature: (table.hash_buckets, index)
            for table in described
            for index, feature in enumerate(table.features)
            if table.hash_buckets
        }
        self._buckets = {
            field.name: buckets[field.vocabulary] for field in schema.sparse if field.vocabulary in buckets
        }
        widths = zip(schema.sparse, manifest.model.widths(served), strict=True)
        self._widths = [physical_dim(width) for field, width in widths for _ in field.keys]
        self._rows = ServedRows(schema, sizes, table_of, np.array(self._widths), manifest.precision)
        self._longest = {name: sequence.max_length for name, sequence in schema.sequences.items()}
        num_dense, labels = len(schema.dense), len(schema.labels)
        network = build_network(manifest.model, served, num_dense, labels, schema.sequences).eval()
        # Masks of -inf are not, in any version.
        self._finite = {name for name, value in network.state_dict().items() if value.isfinite().all()}
        shape = (num_dense, len(keys), max(self._widths))
        self._inference = InferenceNetwork(network, schema.logit_shift, shape, [*self._longest.values()])
        self._largest = torch.finfo(torch.float16 if manifest.precision == "float16" else torch.float32).max
        self._applying, self._predicting = threading.Lock(), threading.Lock()
        self.unknown_ids, self._applied_rows = np.zeros(len(keys), np.int64), 0

    @staticmethod
    def load(export_dir: Path) -> "ServedModel":
        """Loads an export. No code from the folder runs: the network is cowrec's own, or a class that is on Python's
        path here or in the current folder.

        Raises:
            ValueError: the folder is not an export, a file in it is damaged, or the network cannot be imported.
        """
        manifest = Manifest.load(export_dir)
        if manifest.code:  # the folder where it was is not searched: the export may come from others
            search_also(Path.cwd())
        model = ServedModel(manifest, Schema.load(export_dir), export_dir)
        network = model._network(safetensors.torch.load_file(export_dir / DENSE))
        if manifest.code:
            warn_if_changed([manifest.code], export_dir)
        for name, table in manifest.tables.items():
            stored = safetensors.torch.load_file(export_dir / TABLES / f"{name}.safetensors")
            ids = stored["ids"].numpy() if "ids" in stored else np.arange(table.rows)
            feature = stored["feature"].numpy() if "feature" in stored else None
            model._rows.load(ids, model._fields(name, len(ids), feature), stored["rows"], stored.get("scale"))
        model.state = ModelState(model._rows.tables, network, 0, "", manifest.step, manifest.sample_time)
        return model

    @cached_property
    def _fingerprint(self) -> str:
        """Fingerprint of the export; it reads the vocabularies, which only a server that follows a target needs."""
        return fingerprint(self._export_dir, self.manifest.model, self.manifest.tables)

    def predict(self, samples: SampleBlock) -> NDArray[np.float32]:
        """Click probabilities, [B] or [B, T] of T > 1 tasks, of encoded samples on the CPU; labels are ignored."""
        return self.predict_with_version(samples)[0]

    def predict_with_version(self, samples: SampleBlock) -> tuple[NDArray[np.float32], int]:
        """Click probabilities, as by :meth:`predict`, and the version that made them."""
        if self._buckets:
            samples = self._with_bucket_rows(samples)
        with self._predicting:
            state = self.state
            rows = self._rows.gather(samples, state.tables, self.unknown_ids)
            lengths = [samples.bags[name].lengths.clamp(max=most) for name, most in self._longest.items()]
            predicted = state.network(samples.dense, (rows, torch.stack(lengths, 1)) if lengths else rows)
        return predicted.numpy(), state.version

    def apply(self, blob: Blob) -> None:
        """Updates the model to a published version, in three steps.

        The version is prepared, then all predictions that begin use it, then its rows are merged into the tables.

        Raises:
            ValueError: a delta that is not based on the served version, or a version of another model or with numbers
                that are not finite; nothing is changed.
        """
        with self._applying:
            network, change = self._checked(blob), blob.change
            changes = [self._row_change(name, table) for name, table in change.tables.items()]
            (self._rows.replace if blob.kind == "full" else self._rows.overlay)(changes)
            # Until a delta is merged, only a full version could follow.
            lineage = blob.lineage if blob.kind == "full" else ""
            state = ModelState(self._rows.tables, network, blob.version, lineage, change.step, change.sample_time)
            self.state = state
            if blob.kind == "delta":
                with self._predicting:  # the last prediction of an older version has ended
                    pass
                self._rows.merge(changes)
                self.state = dataclasses.replace(state, tables=self._rows.tables, lineage=blob.lineage)
            self._applied_rows += change.num_rows

    def counters(self) -> dict[str, int]:
        """Rows written and removed since the start, and ids that have a row now."""
        return {
            "applied_rows": self._applied_rows,
            "removed_rows": self._rows.removed,
            "resident_ids": self._rows.resident,
        }

    def unknown_by_field(self) -> dict[str, int]:
        """Requested ids without a row of their own, by field, since the start."""
        return {field: int(self.unknown_ids[number]) for field, number in self._number.items()}

    def _with_bucket_rows(self, samples: SampleBlock) -> SampleBlock:
        """Replaces ids of hashed fields by their rows."""
        ids, bags, singles = samples.ids.clone(), dict(samples.bags), self.schema.singles
        for field, bucketing in self._buckets.items():
            if field in bags:
                values = id_bucket_rows(bags[field].values.numpy().astype(np.int64), *bucketing)
                bags[field] = dataclasses.replace(bags[field], values=torch.from_numpy(values))
            else:
                column = ids[:, singles.index(field)]
                column.copy_(torch.from_numpy(id_bucket_rows(column.numpy().astype(np.int64), *bucketing)))
        return dataclasses.replace(samples, ids=ids, bags=bags)

    def _network(self, dense: Mapping[str, Tensor]) -> InferenceNetwork:
        try:
            network = self._inference.with_weights(dense)
        except RuntimeError as error:
            raise UserError(
                f"the dense weights do not fit the served network, a {self.manifest.model.name}: {error}"
            ) from error
        for name, value in dense.items():
            if name in self._finite and not value.isfinite().all():
                raise UserError(f"the dense weights {name!r} are not finite; the training has diverged")
        return network

    def _fields(self, table: str, count: int, feature: NDArray[np.int64] | None) -> NDArray[np.int64]:
        """Number of the field that each of a table's ids belongs to, int64 [count]."""
        numbers = np.array([self._number[field] for field in self.manifest.tables[table].features], np.int64)
        return np.full(count, numbers[0]) if feature is None else numbers[feature]

    def _row_change(self, name: str, table: TableChange) -> RowChange:
        fields = self._fields(name, len(table.ids), table.feature)
        removed_fields = self._fields(name, len(table.deleted), table.deleted_feature)
        return RowChange(table.ids, fields, table.rows, table.deleted, removed_fields)

    def _checked(self, blob: Blob) -> InferenceNetwork:
        """The network of a version. Raises ValueError if the version does not fit this model, or does not follow its
        version.
        """
        now, change = self.state, blob.change
        if blob.fingerprint != self._fingerprint:
            raise UserError(
                f"version {blob.version} is of a run on other data or of another network, whose fingerprint is"
                f" {blob.fingerprint[:12]} instead of {self._fingerprint[:12]}; serve an export of that run (RUN/base)"
            )
        if blob.kind == "delta" and (blob.previous, blob.lineage) != (now.version, now.lineage):
            raise UserError(
                f"delta {blob.version} is based on version {blob.previous} of lineage {blob.lineage!r}, but version"
                f" {now.version} of lineage {now.lineage!r} is served; apply a full version"
            )
        for name, table in change.tables.items():
            if not (np.abs(table.rows) <= self._largest).all():
                raise UserError(f"rows of table {name!r} are not finite numbers; the training has diverged")
        if not change.dense:
            return now.network
        return self._network({name: torch.tensor(weights) for name, weights in change.dense.items()})
