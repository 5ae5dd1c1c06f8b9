"""The data pipeline: raw click logs to Parquet shards of ids, and shards or streams to batches."""

from typing import TYPE_CHECKING, Any

from .codec import BadSample, Encoded, RawSamples, SampleCodec
from .dataset.schema import MISSING, OUT_OF_VOCABULARY, RESERVED_ROWS, DenseField, Schema, SparseField, Split
from .preparation.config import PrepareConfig
from .preparation.prepare import prepare, work_bytes
from .reading.reader import Reader, available_bytes, resident_bytes
from .schema_inference import infer_schema
from .streams.open import open_source
from .streams.position import Position
from .streams.source import Chunk, SampleSource
from .streams.stream import SampleStream, StreamBatch
from .synthetic.drifting import synthesize_drifting
from .synthetic.planted import SynthesizeConfig, synthesize

if TYPE_CHECKING:
    from .dataset.batch import Batch

__all__ = [
    "MISSING",
    "OUT_OF_VOCABULARY",
    "RESERVED_ROWS",
    "BadSample",
    "Batch",
    "Chunk",
    "DenseField",
    "Encoded",
    "Position",
    "PrepareConfig",
    "RawSamples",
    "Reader",
    "SampleCodec",
    "SampleSource",
    "SampleStream",
    "Schema",
    "SparseField",
    "Split",
    "StreamBatch",
    "SynthesizeConfig",
    "available_bytes",
    "infer_schema",
    "open_source",
    "prepare",
    "resident_bytes",
    "synthesize",
    "synthesize_drifting",
    "work_bytes",
]


def __getattr__(name: str) -> Any:
    if name != "Batch":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .dataset.batch import Batch  # imports TorchRec, which takes seconds

    return Batch
