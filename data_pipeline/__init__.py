"""The data pipeline: raw click logs to Parquet shards of ids, and shards or streams to batches."""

from .codec.codec import BadSample, Encoded, RawSamples, SampleCodec
from .dataset.batch import Batch
from .dataset.schema import MISSING, OUT_OF_VOCABULARY, RESERVED_ROWS, DenseField, Schema, SparseField, Split
from .preparation.config import PrepareConfig
from .preparation.prepare import prepare, work_bytes
from .reading.memory import available_bytes, resident_bytes
from .reading.reader import Reader
from .schema_inference.infer import infer_schema
from .streams.open import open_source
from .streams.position import Position
from .streams.source import Chunk, SampleSource
from .streams.stream import SampleStream, StreamBatch
from .synthetic.criteo_like import SynthesizeConfig, synthesize
from .synthetic.drifting_samples import synthesize_drifting

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
