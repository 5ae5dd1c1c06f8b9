"""Raw click logs to Parquet shards of ids, and those to batches. Knows nothing of models."""

from .batch import Batch
from .drifting_samples import synthesize_drifting
from .preparation import prepare, work_bytes
from .prepare_config import PrepareConfig
from .reader import Reader
from .residency import available_bytes, resident_bytes
from .samples import BadSample, Encoded, RawSamples, SampleCodec
from .schema import MISSING, OUT_OF_VOCABULARY, RESERVED_ROWS, DenseField, Schema, SparseField, Split
from .stream import SampleStream, StreamBatch
from .stream_position import Position
from .stream_source import Chunk, SampleSource, open_source
from .synthetic import SynthesizeConfig, synthesize

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
    "open_source",
    "prepare",
    "resident_bytes",
    "synthesize",
    "synthesize_drifting",
    "work_bytes",
]
