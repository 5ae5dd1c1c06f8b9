"""The data pipeline: raw click logs to Parquet shards of ids, and shards or streams to batches.

Names are imported on first use: a batch and its schema need neither pyarrow nor numba.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .codec import BadSample, Encoded, RawSamples, SampleCodec
    from .dataset.batch import Batch
    from .dataset.schema import MISSING, OUT_OF_VOCABULARY, RESERVED_ROWS, DenseField, Schema, SparseField, Split
    from .inference.schema import InferredSchema, infer_schema
    from .preparation.config import PrepareConfig
    from .preparation.prepare import prepare, work_bytes
    from .reading.reader import Reader, available_bytes, resident_bytes
    from .streams.open import open_source
    from .streams.position import Position
    from .streams.source import Chunk, SampleSource
    from .streams.stream import SampleStream, StreamBatch
    from .synthetic.drifting import synthesize_drifting
    from .synthetic.planted import SynthesizeConfig, synthesize

_NAMES = {
    ".codec": "BadSample Encoded RawSamples SampleCodec",
    ".dataset.batch": "Batch",
    ".dataset.schema": "MISSING OUT_OF_VOCABULARY RESERVED_ROWS DenseField Schema SparseField Split",
    ".inference.schema": "InferredSchema infer_schema",
    ".preparation.config": "PrepareConfig",
    ".preparation.prepare": "prepare work_bytes",
    ".reading.reader": "Reader available_bytes resident_bytes",
    ".streams.open": "open_source",
    ".streams.position": "Position",
    ".streams.source": "Chunk SampleSource",
    ".streams.stream": "SampleStream StreamBatch",
    ".synthetic.drifting": "synthesize_drifting",
    ".synthetic.planted": "SynthesizeConfig synthesize",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "MISSING", "OUT_OF_VOCABULARY", "RESERVED_ROWS", "BadSample", "Batch", "Chunk", "DenseField", "Encoded",
    "InferredSchema", "Position", "PrepareConfig", "RawSamples", "Reader", "SampleCodec", "SampleSource",
    "SampleStream", "Schema", "SparseField", "Split", "StreamBatch", "SynthesizeConfig", "available_bytes",
    "infer_schema", "open_source", "prepare", "resident_bytes", "synthesize", "synthesize_drifting", "work_bytes",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name], __name__), name)
