"""The schema of a prepared data set: fields, splits and sources, stored in `schema.json`.

A data set is a folder of `schema.json`, `train/*.parquet`, `test/*.parquet`, and perhaps `vocabulary/*.parquet`. The
schema is written last, so a folder without it is no data set.
"""

import dataclasses
import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from pydantic import TypeAdapter, ValidationError

from cowrec.errors import UserError
from cowrec.files import replace_file

FORMAT_VERSION = 2
SCHEMA_FILE, VOCABULARY_FOLDER = "schema.json", "vocabulary"
LABEL = "label"
TIME = "time"
TRUE_LOGIT = "true_logit"
SAMPLE_WEIGHT = "sample_weight"
SAMPLE_NUMBER = "sample_number"
LABEL_PREFIX, KEPT_PREFIX = "label_", "kept_"
"""Prefixes of the Parquet columns of several labels, and of columns that are kept for predictions."""
WEIGHT_SUFFIX = "__weight"
"""Parquet column of a weighted field's weights: the field's name and this suffix."""
BUCKET_SUFFIX = "_bucket"
"""Field of a numeric field's buckets: its name and this suffix."""
MISSING_SUFFIX = "_missing"
"""Field that is 1 where a numeric field has no value: its name and this suffix."""

OUT_OF_VOCABULARY = 0
"""Embedding row shared by ids never seen in training or rarer than `min_count`."""
MISSING = 1
"""Embedding row of a missing value."""
RESERVED_ROWS = 2
"""Number of reserved embedding rows; the ids' own rows follow."""

SparseKind = Literal["categorical", "multi", "sequence", "weighted"]
Encoding = Literal["vocabulary", "hash", "raw", "synthetic"]
Pooling = Literal["sum", "mean"]
DenseTransform = Literal["quantile", "minmax", "log", "buckets", "none"]
"""Transforms of numbers that `prepare` knows; "buckets" also makes an id feature."""

WINDOW_ROWS = 1 << 20
"""Samples shuffled together by default: about 170 MB for Criteo's 39 fields."""
SHARD_ROWS = 1 << 18
"""Samples of a Parquet file by default: about 20 MB for Criteo's 39 fields."""


@dataclass(frozen=True)
class DenseField:
    """One float feature and its transform.

    Attributes:
        name: Parquet column.
        transform: "minmax": (x - minimum) / (maximum - minimum), 0 if both are equal; "log": log1p(max(x - minimum,
            0)); "none": x itself. In these a missing value is 0 before the transform. "quantile": `levels`,
            interpolated linearly between `knots`, constant outside, 0 if missing. "missing": 1 if missing, else 0.
        minimum, maximum: range of the samples that the transform was fitted on, in raw units.
        source: the raw field.
        knots, levels: for "quantile": numbers in increasing order, and the normal score of each.
        element: place of the number in the vectors of the raw field; None if that field has one number.
    """

    name: str
    transform: Literal["quantile", "minmax", "log", "none", "missing"] = "none"
    minimum: float = 0.0
    maximum: float = 1.0
    source: str = ""
    knots: tuple[float, ...] = ()
    levels: tuple[float, ...] = ()
    element: int | None = None


@dataclass(frozen=True)
class SparseField:
    """One id feature and the size of its embedding table.

    Attributes:
        name: Parquet column, and key of the `KeyedJaggedTensor` unless the field is a sequence, see `keys`.
        kind: "categorical" (exactly one id per sample), "multi" (a list), "sequence" (a list whose order counts),
            "weighted" (a list with float weights).
        num_embeddings: rows of the table, including the two reserved ones; 0 if ids are raw and the trainer decides.
        pooling: reduction of a bag to one vector; a weighted bag is always summed.
        encoding: "vocabulary" (rows by decreasing training count), "hash" (2 + hash % buckets), "raw" (int64 hashes
            that the trainer assigns rows to, see `raw_ids`) or "synthetic".
        source: the raw field.
        bucketed: True if the ids are the logarithmic buckets of an integer column.
        max_length: L, the number of last ids that a sequence keeps; 0 for other kinds.
        shares: categorical field whose ids and table a sequence has; empty for none.
        along: sequence of the same length whose ids a sequence describes one by one; empty for none.
    """

    name: str
    num_embeddings: int
    kind: SparseKind = "categorical"
    pooling: Pooling = "sum"
    encoding: Encoding = "vocabulary"
    source: str = ""
    bucketed: bool = False
    max_length: int = 0
    shares: str = ""
    along: str = ""

    def __post_init__(self) -> None:
        unsized = self.encoding == "raw" and self.num_embeddings == 0
        if self.num_embeddings < RESERVED_ROWS and not unsized:
            raise UserError(f"field {self.name!r}: num_embeddings must be at least 2, got {self.num_embeddings}")
        if self.has_weights and self.pooling != "sum":
            raise UserError(f'field {self.name!r}: a weighted field is always summed; pooling must be "sum"')
        if (self.max_length > 0) != self.is_sequence:
            raise UserError(f"field {self.name!r}: max_length is at least 1 for sequences, and 0 for other kinds")

    @property
    def is_list(self) -> bool:
        """True if a sample has any number of ids, which are in `SampleBlock.bags`; False if it has exactly one."""
        return self.kind != "categorical"

    @property
    def is_sequence(self) -> bool:
        """True if the ids have positions, which are keys of the `KeyedJaggedTensor`."""
        return self.kind == "sequence"

    @property
    def has_weights(self) -> bool:
        return self.kind == "weighted"

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the `KeyedJaggedTensor`: for a sequence, those of its L positions, with at most one id each.

        The last position has the newest id; shorter sequences have no id at the first positions.
        """
        return tuple(f"{self.name}[{position}]" for position in range(self.max_length)) or (self.name,)

    @property
    def vocabulary(self) -> str:
        """The field whose vocabulary and table this field uses."""
        return self.shares or self.name


@dataclass(frozen=True)
class Split:
    """Size of one split, or of one shard.

    Attributes:
        positives: for each label, the sum of labels times sample weights, which is the number of positive samples
            without weights and rates; None if labels are unknown, as in a test set for prediction.
        shards: samples of each Parquet file, in the order of their names.
        values: ids of each list field over all samples.
        weight: sum of the sample weights; None if samples have none.
    """

    rows: int = 0
    positives: tuple[int | float, ...] | None = (0,)
    shards: tuple[int, ...] = ()
    values: Mapping[str, int] = field(default_factory=dict)
    weight: float | None = None

    def __post_init__(self) -> None:
        if self.rows != sum(self.shards) or min(self.shards, default=0) < 0:
            raise UserError(f"a split of {self.rows} rows cannot have shards of {list(self.shards)[:9]} rows")

    @property
    def total(self) -> float:
        """Sum of the sample weights, which are 1 by default."""
        return self.rows if self.weight is None else self.weight

    @property
    def labelled(self) -> bool:
        """False if labels are unknown and stored as NaN, so that the split can be predicted but not evaluated."""
        return self.positives is not None


@dataclass(frozen=True)
class SourceFile:
    """A raw file of the data set: path as given, bytes on disk, and samples including bad rows."""

    path: str
    bytes: int
    rows: int
    bad_rows: int = 0


@dataclass(frozen=True)
class Schema:
    """Description of a prepared data set for readers and trainers; the content of `schema.json`.

    Attributes:
        name: layout or generator of the data ("criteo", "avazu", "tabular", "synthetic").
        dense, sparse: fields, in the order of the columns of `Batch.dense` and of the keys of `Batch.sparse`.
        splits: "train", "test" and possibly "validation".
        timed: True if every sample has a time, in the Parquet column `time`: int64, Unix seconds.
        true_logits: True if every sample has the logit of its true click probability, in the Parquet column
            `true_logit`: float32; for synthetic data.
        best: {"auc", "logloss", "expected_auc", "expected_logloss"} of the true probabilities on the test split, for
            synthetic data.
        settings: configuration that the data set was made with, as plain JSON.
        bad_rows: numbers of the bad samples that were left out, by reason.
        labels: names of the labels, one for each task; the Parquet columns are `label`, or of several labels
            `label_<name>`: float32, from 0 to 1, NaN where unknown.
        sample_weights: True if every sample has a weight, in the Parquet column `sample_weight`: float32, at least 0.
        numbered: True if the Parquet column `sample_number`, int64, has numbers over all raw files; bad rows count.
        kept: raw columns that predictions show beside the probability, in the Parquet columns `kept_<name>`: strings,
            empty where missing.
        negative_fraction: share of the negative samples that the training split kept; 1 for all.
    """

    name: str
    dense: tuple[DenseField, ...]
    sparse: tuple[SparseField, ...]
    splits: Mapping[str, Split]
    timed: bool = False
    best: Mapping[str, float] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    sources: tuple[SourceFile, ...] = ()
    bad_rows: dict[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION
    true_logits: bool = False
    labels: tuple[str, ...] = (LABEL,)
    sample_weights: bool = False
    numbered: bool = False
    kept: tuple[str, ...] = ()
    negative_fraction: float = 1.0

    def __post_init__(self) -> None:
        if not self.labels or len(set(self.labels)) < len(self.labels):
            raise UserError(f"labels must be one name or several different ones, got {list(self.labels)}")
        names = [*self.label_columns, *(KEPT_PREFIX + name for name in self.kept)]
        names += [TIME] * self.timed + [TRUE_LOGIT] * self.true_logits
        names += [SAMPLE_WEIGHT] * self.sample_weights + [SAMPLE_NUMBER] * self.numbered
        names += [number.name for number in self.dense] + [ids.name for ids in self.sparse]
        names += [field.name + WEIGHT_SUFFIX for field in self.sparse if field.has_weights]
        repeated = sorted(name for name, count in Counter(names).items() if count > 1)
        if repeated:
            raise UserError(f"column names must differ, but {repeated} occur more than once")
        by_name = {field.name: field for field in self.sparse}
        for name, sparse in by_name.items():
            sequence = by_name.get(name.rpartition("[")[0])
            if sequence and sequence.max_length and name in sequence.keys:
                raise UserError(f"field {name!r} has the name of a sequence's position; give one of them another name")
            owner = by_name.get(sparse.vocabulary)
            if owner is None or (owner.num_embeddings, owner.encoding) != (sparse.num_embeddings, sparse.encoding):
                raise UserError(f"field {name!r} shares {sparse.shares!r}, which is no field of the same size")
            if sparse.along and (sparse.along not in by_name or by_name[sparse.along].max_length != sparse.max_length):
                raise UserError(f"field {name!r} is along {sparse.along!r}, which is no sequence of this length")

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for field in self.sparse for key in field.keys)

    @property
    def label_columns(self) -> tuple[str, ...]:
        return label_columns(self.labels)

    @property
    def logit_shift(self) -> float:
        """Number that corrects the logits of a model that was trained with a share q of the negatives: log q.

        A click probability p in training is p / (p + (1 - p) / q) in truth. Source: He et al. 2014, "Practical lessons
        from predicting clicks on ads at Facebook", section 6.3.
        """
        return math.log(self.negative_fraction)

    def of_batches(self, *, true_logits: bool = False) -> "Schema":
        """Returns the schema without the columns that batches lack; batches have true logits only if asked."""
        return replace(self, true_logits=self.true_logits and true_logits, numbered=False, kept=())

    @property
    def singles(self) -> tuple[str, ...]:
        """Names of the fields with one id in each sample: the columns of `SampleBlock.ids`."""
        return tuple(field.name for field in self.sparse if not field.is_list)

    @property
    def lists(self) -> "dict[str, SparseField]":
        """The fields with any number of ids in a sample, by name: those of `SampleBlock.bags`."""
        return {field.name: field for field in self.sparse if field.is_list}

    @property
    def sequences(self) -> "dict[str, SparseField]":
        """The fields of kind "sequence", by name."""
        return {field.name: field for field in self.sparse if field.is_sequence}

    @property
    def is_weighted(self) -> bool:
        """True if the `KeyedJaggedTensor` has weights, because at least one field is weighted."""
        return any(field.has_weights for field in self.sparse)

    @property
    def has_raw_ids(self) -> bool:
        """True if ids are int64, because at least one field has raw ids; otherwise they are int32."""
        return any(field.encoding == "raw" for field in self.sparse)

    def split(self, name: str) -> Split:
        """Returns a split. Raises ValueError if there is none of that name."""
        if name not in self.splits:
            raise UserError(f"no split {name!r} in data set {self.name!r}; it has {sorted(self.splits)}")
        return self.splits[name]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes `schema.json` into `folder` atomically."""
        content = json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False)
        replace_file(Path(folder) / SCHEMA_FILE, content.encode())

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> "Schema":
        """Reads `folder/schema.json`. Raises ValueError if it is absent, damaged or of another format version."""
        path = Path(folder) / SCHEMA_FILE
        try:
            text = path.read_text(encoding="utf-8")
            content = json.loads(text)
        except FileNotFoundError:
            raise UserError(
                f"{folder} is not a prepared data set: it has no {SCHEMA_FILE}. An interrupted `prepare` leaves none; "
                "run it again"
            ) from None
        except NotADirectoryError:
            raise UserError(
                f"{folder} is a file, not the folder of a prepared data set; if it has raw samples, cowrec fit {folder}"
                f" trains on them, and cowrec predict and evaluate take them with --input {folder}"
            ) from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise UserError(f"{path} cannot be read ({error}); prepare the data set again") from error
        version = content.get("format_version") if isinstance(content, dict) else None
        if version != FORMAT_VERSION:
            raise UserError(f"{path} has format version {version!r}, not {FORMAT_VERSION}; prepare the data set again")
        try:
            # Strict JSON mode requires exact types, and accepts a list for a tuple.
            return _adapter().validate_json(text, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"]) or "top level"
            raise UserError(f"{path} does not describe a data set ({key}: {first['msg']}); prepare it again") from error


_LONGEST_NAME = 200


def escaped_name(name: str) -> str:
    """Returns a unique form of a field's name that can name a file and a module of torch.

    Letters, digits, _ and - stay, other bytes of the UTF-8 become %XX; a long name is cut and gets a digest.
    """
    escaped = re.sub("[.~]", lambda found: f"%{ord(found[0]):02X}", quote(name, safe="")) or "%"
    if len(escaped) <= _LONGEST_NAME:
        return escaped
    return f"{escaped[:_LONGEST_NAME]}%{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def vocabulary_file(folder: Path, field: str) -> Path:
    return folder / VOCABULARY_FOLDER / f"{escaped_name(field)}.parquet"


def label_columns(labels: Sequence[str]) -> tuple[str, ...]:
    return (LABEL,) if len(labels) == 1 else tuple(LABEL_PREFIX + name for name in labels)


@cache
def _adapter() -> TypeAdapter[Schema]:
    """Returns the validator of schemas, which pydantic takes tens of milliseconds to build."""
    return TypeAdapter(Schema)


def library_versions() -> dict[str, str]:
    """Returns the versions of the libraries that write or read a data set's bytes."""
    import numpy
    import pyarrow

    return {"pyarrow": pyarrow.__version__, "numpy": numpy.__version__}
