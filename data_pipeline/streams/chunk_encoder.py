"""Encoding of a stream's chunks: drops and logs malformed samples, and hashes sample ids."""

import dataclasses
import logging
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cowrec.data_pipeline.codec.codec import TIME_COLUMN, BadSample, Encoded, SampleCodec
from cowrec.data_pipeline.dataset.schema import Schema
from cowrec.data_pipeline.hashing import string_hashes

from .reorder import ReorderBuffer
from .source import Chunk

MAX_LOGGED, LOG_SECONDS = 5, 60.0
"""Malformed samples logged in so many seconds; all are counted."""

logger = logging.getLogger(__name__)


class ChunkEncoder:
    """Encodes chunks with a codec.

    Args:
        codec: encodes raw samples.
        ahead_seconds: a sample whose time is more than this ahead of the clock is malformed; 0: no limit.
    """

    def __init__(self, codec: SampleCodec, ahead_seconds: int) -> None:
        self._codec, self._ahead = codec, ahead_seconds
        self._logged, self._since = 0, time.monotonic()

    @property
    def schema(self) -> Schema:
        """Schema of the encoded samples."""
        return self._codec.schema

    def encode(self, chunk: Chunk, now: int) -> Encoded:
        """Encodes the good samples of a chunk that arrived at `now`, Unix seconds; logs the first malformed ones."""
        table = isinstance(chunk.samples, pa.Table)
        raw = self._codec.from_table(chunk.samples) if table else self._codec.from_json(chunk.samples)
        try:
            encoded = self._codec.encode(raw)
        except ValueError as error:
            bad = tuple(BadSample(index, str(error)) for index in range(len(chunk)))
            encoded = dataclasses.replace(self._no_samples(), bad=bad)
        if self._ahead:
            reason = f"its time is over {self._ahead} s in the future"
            encoded = encoded.without(encoded.time > now + self._ahead, reason)
        if time.monotonic() - self._since > LOG_SECONDS:
            self._logged, self._since = 0, time.monotonic()
        partition = f" of partition {chunk.partition}" if chunk.partition else ""
        for each in encoded.bad[: max(0, MAX_LOGGED - self._logged)]:
            self._logged += 1
            place = f"sample {each.index} after {_shown(chunk.start)}{partition}"
            logger.warning("%s is dropped: %s", place, each.reason)
        return encoded

    def check_columns(self, waiting: ReorderBuffer) -> None:
        """Raises ValueError if waiting samples were encoded for another data set."""
        expected = self._no_samples().table.schema
        for table in waiting.tables:
            if [(each.name, each.type) for each in table.schema] != [(each.name, each.type) for each in expected]:
                raise ValueError("the position is of a stream with other fields; start without it")

    def _no_samples(self) -> Encoded:
        return self._codec.encode(self._codec.from_objects([]))


def _shown(start: Any) -> str:
    """A place in a source, in words."""
    return ", ".join(f"{key} {value}" for key, value in start.items()) if isinstance(start, dict) else str(start)


def with_times(table: pa.Table, time: np.ndarray) -> pa.Table:
    """Returns the columns of `Encoded.table` with other times, int64 [R]."""
    return table.set_column(table.column_names.index(TIME_COLUMN), TIME_COLUMN, pa.array(time))


def id_hashes(encoded: Encoded) -> np.ndarray:
    """Returns the hash of each sample id, uint64 [R]; 0 for a sample without an id."""
    ids = encoded.sample_ids.combine_chunks()
    ids = pa.concat_arrays(ids.chunks) if isinstance(ids, pa.ChunkedArray) else ids
    hashes = np.maximum(string_hashes(ids), np.uint64(1))
    return np.where(pc.equal(ids, "").to_numpy(zero_copy_only=False), np.uint64(0), hashes)
