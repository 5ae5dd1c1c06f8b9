"""Rows of Parquet files in parts, with bounded memory."""

import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cowrec.data_pipeline.raw.inputs import InputFile
from cowrec.data_pipeline.raw.reading import blocks, look, survey


def test_a_large_row_group_is_read_in_parts(tmp_path):
    rows = 2_000_000
    numbers = np.random.default_rng(0).integers(0, 2**40, (4, rows))
    table = pa.table({f"c{n}": column for n, column in enumerate(numbers)})
    pq.write_table(table, tmp_path / "raw", row_group_size=rows, use_dictionary=False)
    source, _ = look(InputFile(str(tmp_path / "raw")))
    file = survey(source, lambda _: None, header=True, segment_samples=300_000, block_bytes=1 << 20)
    before, most, found = pa.total_allocated_bytes(), 0, 0
    for segment, block in zip(file.segments, blocks(file.segments), strict=True):
        most = max(most, pa.total_allocated_bytes() - before)
        assert block.data.equals(table.slice(segment.offset, segment.size))
        found += block.samples
    assert found == rows
    assert most < table.nbytes / 2, "64 MB in parts of 1 MB"
    order = random.Random(0).choices(file.segments, k=5)
    for segment, block in zip(order, blocks(order), strict=True):
        assert block.data.equals(table.slice(segment.offset, segment.size))
