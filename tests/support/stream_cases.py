"""Numbered samples for tests of streams, and the expected result from a plain Python loop."""

import json
import os
import time
from collections import OrderedDict
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq

from cowrec.data_pipeline import PrepareConfig, SampleCodec
from cowrec.data_pipeline.streams.source import Chunk
from raw_cases import prepare_text

SCHEMA = """
header = false
columns = ["label", "number", "id", "tags", "time"]
time = "time"
fields = [
    {name = "number", kind = "numeric"},
    {name = "id", kind = "categorical"},
    {name = "tags", kind = "multi", separator = "|"},
]
"""


def make_codec(folder):
    """Codec of a tiny data set without scaling of numbers, so that `number` identifies the sample."""
    config = PrepareConfig(raw_ids=True, dense="none", test_fraction=0.0)
    prepare_text(folder, SCHEMA, "1,1,a,b,1\n0,2,b,c,2\n", config=config)
    return SampleCodec.load(folder / "out")


def sample(number, time, sample_id=None, **changes):
    made = {"label": number % 2, "number": number, "id": f"i{number % 7}", "tags": ["t"] * (number % 3), "time": time}
    return {**made, "sample_id": sample_id, **changes}


def as_table(samples):
    kinds = {"label": pa.int8(), "number": pa.float64(), "id": pa.string(), "tags": pa.list_(pa.string())}
    return pa.Table.from_pylist(samples, pa.schema({**kinds, "time": pa.int64(), "sample_id": pa.string()}))


def write_file(folder, name, samples):
    """Writes a file and renames it into the folder."""
    partial = folder / f".{name}.partial"
    if name.endswith(".parquet"):
        pq.write_table(as_table(samples), partial, row_group_size=3)
    else:
        with pa.OSFile(str(partial), "wb") as file, pa.ipc.new_file(file, as_table(samples).schema) as writer:
            writer.write_table(as_table(samples), max_chunksize=3)
    os.replace(partial, folder / name)


def write_all(folder, samples, sizes):
    """Writes files of the given sizes, then the end marker."""
    folder.mkdir(exist_ok=True)
    start = 0
    for index, size in enumerate(sizes):
        write_file(folder, f"{index:04d}.{'parquet' if index % 2 else 'arrow'}", samples[start : start + size])
        start += size
    (folder / "_END").touch()


class RandomSource:
    """Source over lists whose polls return a random number of samples, or none, so that chunks differ each time.

    Partitions that have not ended are behind if ``has_backlog``.
    """

    def __init__(self, partitions, chance, *, has_backlog=False):
        self.partitions, self._chance, self._has_backlog = partitions, chance, has_backlog
        self.ended, self.counters = False, {}
        self.seek({})

    def seek(self, positions):
        self._positions = {name: positions.get(name, 0) for name in self.partitions}
        self.ended = False

    def poll(self, max_samples, timeout):
        remaining = [name for name, samples in self.partitions.items() if self._positions[name] < len(samples)]
        self.ended = not remaining
        if self.ended or self._chance.random() < 0.3:
            return None
        name = self._chance.choice(remaining)
        start = self._positions[name]
        end = min(len(self.partitions[name]), start + self._chance.randint(1, 7))
        self._positions[name] = end
        remaining = [
            partition for partition in remaining if self._positions[partition] < len(self.partitions[partition])
        ]
        return replace(self.read(name, start, end), behind=remaining if self._has_backlog else ())

    def read(self, partition, start, end):
        return Chunk(partition, start, end, self.partitions[partition][start:end])

    def close(self):
        pass


def numbers(batch):
    return [int(number) for number in batch.block.dense[:, 0].tolist()]


def all_numbers(batches):
    return [number for batch in batches for number in numbers(batch)]


def numbered(*ends):
    """Makes the samples of a range, each at the time of its number."""
    return [sample(number, number) for number in range(*ends)]


def lines(samples):
    return [json.dumps(fields).encode() for fields in samples]


def arrivals(samples, lateness, window):
    """Filters samples one by one: returns (time, number) of good ones by arrival, and counts."""
    recent, good, newest = OrderedDict(), [], None
    counts = {"duplicates": 0, "late": 0}
    for found in samples:
        known = found["sample_id"]
        if window and known:
            if known in recent:
                counts["duplicates"] += 1
                continue
            recent[known] = True
            if len(recent) > window:
                recent.popitem(last=False)
        late = newest is not None and found["time"] < newest - lateness
        counts["late"] += late
        newest = found["time"] if newest is None else max(newest, found["time"])
        if not late:
            good.append((found["time"], found["number"]))
    return good, counts


def polled(source, count):
    chunks, deadline = [], time.monotonic() + 600
    while sum(len(chunk) for chunk in chunks) < count:
        assert time.monotonic() < deadline, f"only {sum(map(len, chunks))} of {count} samples arrived"
        chunk = source.poll(1000, 0.1)
        chunks += [chunk] if chunk is not None else []
    return chunks


def contents(chunks):
    return [int(fields["number"]) for chunk in chunks for fields in samples_of(chunk)]


def samples_of(chunk):
    return chunk.samples.to_pylist() if isinstance(chunk.samples, pa.Table) else map(json.loads, chunk.samples)


def batches_of(stream, count):
    batches, deadline = [], time.monotonic() + 600
    while sum(len(batch.block) for batch in batches) < count:
        assert time.monotonic() < deadline, f"only {[numbers(batch) for batch in batches]}"
        batch = stream.next_batch(0.1)
        batches += [batch] if batch is not None else []
    return batches


def returned(stream, count):
    return all_numbers(batches_of(stream, count))
