"""Form of an export: its manifest, with a checksum of every other file, and its rows in float32, float16 or int8.

Its files are manifest.json, schema.json, vocabulary/, dense.safetensors, network.pt2 and tables/NAME.safetensors.
Sizes: n rows, P stored width of a table.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from cowrec.data_pipeline import Schema
from cowrec.data_pipeline.dataset.schema import vocabulary_file
from cowrec.data_pipeline.encoding.vocabulary import one_array
from cowrec.data_pipeline.hashing import string_buffers
from cowrec.errors import UserError
from cowrec.files import write_file
from cowrec.models import ModelConfig

from ..runs.checkpoint_files import damage
from ..runs.run_dir import OwnCode

Precision = Literal["float32", "float16", "int8"]
_MAX_INT8 = 127  # symmetric: -128 is not used
MANIFEST, DENSE, NETWORK, TABLES = "manifest.json", "dense.safetensors", "network.pt2", "tables"


@dataclass(frozen=True)
class TableManifest:
    """One table of an export.

    Attributes:
        features: fields that it serves.
        collisionless: whether rows are found by the ids stored with them; otherwise an id is the number of its row.
        max_error: largest absolute difference between a stored weight and the trained one.
        hash_buckets: number of buckets that ids are hashed into; 0 if they are not hashed.
    """

    features: tuple[str, ...]
    rows: int
    collisionless: bool
    max_error: float
    hash_buckets: int = 0


@dataclass(frozen=True)
class Manifest:
    """An exported model.

    Attributes:
        logits_error: largest absolute difference between the logits of network.pt2 on the stored tables and those of
            the trained model, on a probe of random rows, one for each field.
        sample_time: newest sample trained on, Unix seconds; None if samples have no time.
        files: size in bytes and SHA-256 of every other file, by its path in the folder.
        code: code of the network, if it is the user's own.
    """

    model: ModelConfig
    precision: Precision
    tables: dict[str, TableManifest]
    logits_error: float
    step: int
    sample_time: int | None = None
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    code: OwnCode | None = None
    format: Literal[1] = 1

    def save(self, folder: Path) -> None:
        text = json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False)
        write_file(folder / MANIFEST, text.encode())

    @staticmethod
    def load(folder: Path) -> "Manifest":
        """Reads ``folder/manifest.json`` and verifies the checksum of every other file.

        Raises UserError: the manifest is missing, damaged or of another format, or another file is damaged.
        """
        path = folder / MANIFEST
        try:
            manifest = TypeAdapter(Manifest).validate_json(path.read_bytes(), strict=True)
        except FileNotFoundError:
            raise UserError(
                f"{folder} is not an export: it has no {MANIFEST}; cowrec export RUN --output EXPORT makes one"
            ) from None
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise UserError(f"{path} cannot be read ({place}: {first['msg']}); export the model again") from error
        if found := damage(folder, manifest.files):
            raise UserError(f"{folder} is damaged: {found}; export the model again")
        return manifest


def fingerprint(folder: Path, model: ModelConfig, tables: Mapping[str, TableManifest]) -> str:
    """Computes the SHA-256 of what weights mean: network, tables, and the data's fields, labels and vocabularies.

    The folder is an export or a data set. Of a table its fields count, and how an id finds its row. Settings that
    change neither predictions nor the weights' names and shapes, such as dropout, are not part of it.
    """
    schema = Schema.load(folder)
    names = [field.name for field in schema.sparse]
    widths = dict(zip(names, model.widths(names), strict=True))
    network = dataclasses.replace(model, dropout=0.0, embedding_dims=widths)
    parts: list[Any] = [network, *schema.dense, *schema.sparse]
    found_by = {
        name: (table.features, None if table.collisionless else table.rows) for name, table in sorted(tables.items())
    }
    text = json.dumps([*map(dataclasses.asdict, parts), schema.labels, schema.negative_fraction, found_by])
    # A number without a fraction is read back as an integer or as a float.
    digest = hashlib.sha256(json.dumps(json.loads(text, parse_int=float), sort_keys=True).encode())
    for name in names:
        if (file := vocabulary_file(folder, name)).is_file():
            offsets, data = string_buffers(one_array(pq.read_table(file, columns=["value"])["value"]))
            digest.update(np.diff(offsets).data)
            digest.update(data[offsets[0] : offsets[-1]].data)
    return digest.hexdigest()


def quantise(rows: Tensor, precision: Precision) -> dict[str, Tensor]:
    """Converts rows, float32 [n, P], to the form in which they are stored.

    Float16 rounds to nearest. Int8 stores ``round(row / scale)`` with ``scale = max |row| / 127``, so the error is at
    most half a scale.

    Returns ``rows`` [n, P] in that precision and, for int8, ``scale`` float32 [n], 0 for rows of zeros.

    Raises UserError: a value cannot be represented in the precision.
    """
    if precision == "float32":
        return {"rows": rows.contiguous()}
    if precision == "float16":
        stored = rows.half()
        if not stored.isfinite().all():
            raise UserError(
                f"a weight of {rows.abs().max().item():g} exceeds the largest float16, 65504; export in float32"
            )
        return {"rows": stored.contiguous()}
    if not rows.isfinite().all():
        raise UserError("a weight is not finite and cannot be stored as int8; export in float32")
    scale = rows.abs().amax(1) / _MAX_INT8 if rows.numel() else rows.new_zeros(len(rows))
    rounded = (rows / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round().clamp(-_MAX_INT8, _MAX_INT8)
    return {"rows": rounded.to(torch.int8).contiguous(), "scale": scale}


def dequantise(rows: Tensor, scale: Tensor | None = None) -> Tensor:
    """Converts stored rows [n, P] and, for int8, their scales [n] to float32 [n, P]."""
    return rows.float() if scale is None else rows.float() * scale[:, None]
