"""Raw click logs to Parquet shards of ids, and those to batches. Knows nothing of models."""

from .batch import Batch
from .drifting_samples import synthesize_drifting
from .preparation import prepare, work_bytes
from .prepare_config import PrepareConfig
from .reader import Reader
from .residency import available_bytes, resident_bytes
from .samples import BadSample, Encoded, RawSamples, SampleCodec
from .schema import MISSING, OUT_OF_VOCABULARY, RESERVED_ROWS, DenseField, Schema, SparseField, Split
from .synthetic import SynthesizeConfig, synthesize

__all__ = [
    "MISSING",
    "OUT_OF_VOCABULARY",
    "RESERVED_ROWS",
    "BadSample",
    "Batch",
    "DenseField",
    "Encoded",
    "PrepareConfig",
    "RawSamples",
    "Reader",
    "SampleCodec",
    "Schema",
    "SparseField",
    "Split",
    "SynthesizeConfig",
    "available_bytes",
    "prepare",
    "resident_bytes",
    "synthesize",
    "synthesize_drifting",
    "work_bytes",
]
