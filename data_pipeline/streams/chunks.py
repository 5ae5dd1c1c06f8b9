"""Encoding of chunks of R samples: a malformed one is left out, counted and logged; missing values by field."""

import dataclasses
import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..codec import BadSample, Encoded, SampleCodec
from ..dataset.schema import MISSING
from ..dataset.shards import flat_ids, shard_columns
from ..hashing import string_hashes
from .source import Chunk

TIME_LIMITS = 0, 1 << 32
"""First valid time of a sample, Unix seconds, and the first one after it that is not: those of id tables."""
MOST_HALVED = 1000
"""Parts of a chunk that are tried again in halves."""
MAX_LOGGED, LOG_SECONDS = 5, 60.0
"""Malformed samples logged in so many seconds; all are counted."""

_OF_SAMPLES = (pa.ArrowInvalid, pa.ArrowCapacityError, UnicodeError, OverflowError, RecursionError)
_OF_COLUMNS = (ValueError, LookupError, pa.ArrowNotImplementedError, pa.ArrowTypeError)
"""What encoding raises for some samples of a chunk, and what for all of them, whatever a producer has sent: neither may
end the stream, which would meet it again at each resume. A lack of memory is neither."""

logger = logging.getLogger(__name__)


class ChunkEncoder:
    """Encodes the chunks of a stream; `ahead_seconds` as in `SampleStream`.

    `missing` has the samples without a value by field, see :class:`MissingValues`, since this was made.
    """

    def __init__(self, codec: SampleCodec, ahead_seconds: int) -> None:
        self._codec, self._ahead = codec, ahead_seconds
        self._missing, self.missing = MissingValues(codec), Counter[str]()
        self._logged, self._since, self._absent = 0, time.monotonic(), set[str]()

    def encode(self, chunk: Chunk, now: int) -> Encoded:
        """Encodes the good samples of a chunk that arrived at `now`, Unix seconds; logs the first malformed ones."""
        encoded = self._encode_parts(chunk.samples)
        wrong = (encoded.time < TIME_LIMITS[0]) | (encoded.time >= TIME_LIMITS[1])
        encoded = encoded.without(wrong, "its time must be in [0, 2^32) Unix seconds, the years 1970 to 2106")
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

    def count_missing(self, encoded: Encoded) -> None:
        self.missing.update(self._missing.count(encoded.table))

    def _encode_parts(self, samples: Sequence[bytes] | pa.Table) -> Encoded:
        """Encodes samples, in halves if that fails, so that one that cannot be encoded loses no others.

        Which ones are malformed depends on the samples alone. After `MOST_HALVED` failures, further parts are malformed
        as a whole.
        """
        parts, starts, left, halved = list[Encoded](), list[int](), [(0, len(samples))], 0
        while left:
            begin, end = left.pop()
            try:
                part = self._encode_all(samples[begin:end])
            except _OF_SAMPLES as error:
                if end - begin > 1 and halved < MOST_HALVED:
                    halved, middle = halved + 1, (begin + end) // 2
                    left += [(middle, end), (begin, middle)]
                    continue
                part = self._malformed(end - begin, error)
            except _OF_COLUMNS as error:
                part = self._malformed(end - begin, error)
            parts.append(part)
            starts.append(begin)
        return _joined(parts, starts)

    def _encode_all(self, samples: Sequence[bytes] | pa.Table) -> Encoded:
        if isinstance(samples, pa.Table):
            return self._codec.encode(self._codec.from_table(samples))
        given, absent = self._codec.with_absent_columns(self._codec.from_json(samples))
        for name in sorted({*absent} - self._absent if len(given.table) else ()):
            self._absent.add(name)
            logger.warning("no sample of a chunk has the column %r, whose values count as missing", name)
        return self._codec.encode(given)

    def _malformed(self, count: int, error: Exception) -> Encoded:
        bad = tuple(BadSample(index, str(error)) for index in range(count))
        return dataclasses.replace(self.no_samples(), bad=bad)

    def no_samples(self) -> Encoded:
        return self._codec.encode(self._codec.from_objects([]))


class MissingValues:
    """Finds missing values in encoded samples, in the same way in a stream and in a data set.

    In a field of numbers a missing value is encoded as a number that may also be another value's, such as 0.
    """

    def __init__(self, codec: SampleCodec) -> None:
        self._schema = codec.schema
        block, _ = codec.encode_request([dict.fromkeys(codec.columns)])
        self._numbers = block.dense[0].tolist() if len(block) else [math.nan] * len(self._schema.dense)

    def count(self, table: pa.Table) -> Counter[str]:
        """Returns the samples without a value by field, from columns of a data set or of `Encoded.table`."""
        found = Counter[str]()
        for field, code in zip(self._schema.dense, self._numbers, strict=True):
            found[field.name] = int((table[field.name].to_numpy() == np.float32(code)).sum())
        for each in self._schema.sparse:
            column = table[each.name]
            empty = pc.sum(pc.equal(pc.list_value_length(column), 0)).as_py() if each.is_list else 0
            found[each.name] = (empty or 0) + (pc.sum(pc.equal(flat_ids(column), MISSING)).as_py() or 0)
        return found

    def usual_shares(self, data_dir: Path) -> dict[str, float]:
        """Returns the share of samples without a value by field, in the first shard of a data set's training split."""
        names = [each.name for each in self._schema.dense] + [each.name for each in self._schema.sparse]
        for table in shard_columns(data_dir, self._schema, "train", names):
            if table.num_rows:
                return {name: count / table.num_rows for name, count in self.count(table).items()}
        return {}


def _joined(parts: Sequence[Encoded], starts: Sequence[int]) -> Encoded:
    """Joins parts of the samples of a chunk; `starts` are the indices of their first samples."""
    if len(parts) == 1:
        return parts[0]
    pairs = [*zip(parts, starts, strict=True)]
    table = pa.concat_tables([part.table for part in parts]).combine_chunks()
    index = np.concatenate([part.index + start for part, start in pairs])
    bad = tuple(BadSample(each.index + start, each.reason) for part, start in pairs for each in part.bad)
    return Encoded(parts[0].schema, table, parts[0].timed, index, bad)


def _shown(start: Any) -> str:
    return ", ".join(f"{key} {value}" for key, value in start.items()) if isinstance(start, dict) else str(start)


def id_hashes(encoded: Encoded) -> np.ndarray:
    """Returns the hash of each sample id, uint64 [R]; 0 for a sample without an id."""
    ids = encoded.sample_ids.combine_chunks()
    ids = pa.concat_arrays(ids.chunks) if isinstance(ids, pa.ChunkedArray) else ids
    hashes = np.maximum(string_hashes(ids), np.uint64(1))
    return np.where(pc.equal(ids, "").to_numpy(zero_copy_only=False), np.uint64(0), hashes)
