"""Manifest of an export: the description of the model, and a checksum of every other file.

manifest.json  schema.json  vocabulary/  dense.safetensors  network.pt2  tables/NAME.safetensors
"""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from cowrec.data_pipeline.files import checksum, write_file
from cowrec.models import ModelConfig
from cowrec.trainer.runs.own_code import OwnCode

from .quantised_rows import Precision

FORMAT = 1
MANIFEST, DENSE, NETWORK, TABLES = "manifest.json", "dense.safetensors", "network.pt2", "tables"


@dataclass(frozen=True)
class TableManifest:
    """One table of an export.

    Attributes:
        features: fields that it serves.
        rows: number of rows.
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
        model: configuration of the network.
        precision: of the tables.
        tables: by name.
        logits_error: largest absolute difference between the logits of network.pt2 on the stored tables and those of
            the trained model, on a probe of random rows, one for each field.
        step: training steps taken.
        sample_time: newest sample trained on, Unix seconds; None if samples have no time.
        files: size in bytes and SHA-256 of every other file, by its path in the folder.
        versions: of the libraries that wrote the export.
        code: of the network, if it is the user's own.
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
    format: int = FORMAT

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False)

    def save(self, folder: Path) -> None:
        """Writes the manifest. Raises OSError if the disk is full."""
        write_file(folder / MANIFEST, self.to_json().encode())

    @staticmethod
    def load(folder: Path) -> "Manifest":
        """Reads ``folder/manifest.json`` and verifies the checksum of every other file.

        Raises:
            ValueError: the manifest is missing, damaged or of another format, or another file is damaged.
        """
        path = folder / MANIFEST
        try:
            text = path.read_bytes().decode()
            content = json.loads(text)
        except FileNotFoundError:
            raise ValueError(
                f"{folder} is not an export: it has no {MANIFEST}; create one with cowrec export"
            ) from None
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read ({error}); export the model again") from error
        version = content.get("format") if isinstance(content, dict) else None
        if version != FORMAT:
            raise ValueError(f"{path} has format {version!r}, but this cowrec reads {FORMAT}; export the model again")
        try:
            manifest = TypeAdapter(Manifest).validate_json(text, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"{path} is invalid ({place}: {first['msg']}); export the model again") from error
        manifest._check_files(folder)
        return manifest

    def _check_files(self, folder: Path) -> None:
        for name, (size, sha256) in self.files.items():
            file = folder / name
            if not file.is_file() or file.stat().st_size != size or checksum(file) != sha256:
                problem = "does not match its checksum" if file.is_file() else "is missing"
                raise ValueError(f"{folder} is damaged: {name} {problem}; export the model again")
