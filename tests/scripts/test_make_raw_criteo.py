"""Raw files generated in Criteo's layout: `prepare` finds the ids and numbers they were made of."""

import gzip
import re
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from cowrec.data_pipeline import PrepareConfig, prepare
from cowrec.data_pipeline.synthetic.criteo_ids import CriteoIds
from scripts import make_raw_criteo

ROWS = 70_000  # more than a chunk of the writer


def make(*arguments: object) -> None:
    """Runs the script in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["make_raw_criteo.py", *map(str, arguments)])
        make_raw_criteo.main()


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("raw") / "train.txt"
    make("--rows", ROWS, "--seed", 3, "--output", path)
    return path


def test_rows_resemble_kaggles_file(raw: Path) -> None:
    rows = [line.split("\t") for line in raw.read_text().splitlines()]
    assert len(rows) == ROWS
    assert {len(row) for row in rows} == {40}
    columns = list(zip(*rows, strict=True))
    # Three standard deviations of a share of 70,000 rows are 0.6 points at most.
    assert abs(columns[0].count("1") / ROWS - 0.256) < 0.006
    for column in columns[1:14]:
        assert all(re.fullmatch(r"\d{0,8}", value) for value in set(column))
    for column in columns[14:]:
        assert all(re.fullmatch(r"([0-9a-f]{8})?", value) for value in set(column))
    missing = [column.count("") / ROWS for column in columns[1:]]
    assert missing[1] == 0
    assert abs(missing[0] - 0.45) < 0.006
    assert abs(missing[13 + 18] - 0.414) < 0.006  # C19
    assert abs(raw.stat().st_size / ROWS - 243) < 1, "11.1 GB for 45.8 million rows"


def test_ids_have_the_fitted_frequencies(raw: Path, tmp_path: Path) -> None:
    """Distinct ids have distinct texts: as many in each field as the stream has, except the missing one."""
    schema = prepare("criteo", [raw], tmp_path / "out", PrepareConfig(test_fraction=0.0, validation_fraction=0.0))
    for field, values in zip(schema.sparse, CriteoIds(3).values(0, ROWS), strict=True):
        # Two rows are reserved; the stream counts missing ids as one id.
        assert field.num_embeddings - 2 - len(np.unique(values)) in (0, -1)


def test_a_row_depends_on_the_seed_but_not_on_the_length(raw: Path, tmp_path: Path) -> None:
    lines = raw.read_bytes().splitlines(keepends=True)
    unpack = {"gz": gzip.decompress, "zst": lambda data: pa.CompressedInputStream(pa.BufferReader(data), "zstd").read()}
    for suffix, unpacked in unpack.items():
        make("--rows", 500, "--seed", 3, "--output", tmp_path / f"a.{suffix}")
        assert unpacked((tmp_path / f"a.{suffix}").read_bytes()) == b"".join(lines[:500])
    make("--rows", 500, "--seed", 4, "--output", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() != b"".join(lines[:500])
