"""Raw files as blocks: all compressions of text, any boundaries, intact or damaged; row groups in parts."""

import bz2
import gzip
import io
import lzma
import pickle
import random
import struct
import tarfile
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cowrec.data_pipeline.raw.inputs import partitions
from cowrec.data_pipeline.raw.reading import blocks, look, survey
from refusal import refused

TEXT = "".join(f"{number},{random.Random(number).random()}\n" for number in range(3000)).encode()


def zipped(data, **others):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__MACOSX/._clicks.csv", "rubbish")
        archive.writestr("logs/clicks.csv", data)
        for name, content in others.items():
            archive.writestr(name, content)
    return packed.getvalue()


def tarred(data):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        member = tarfile.TarInfo("clicks.csv")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    return packed.getvalue()


COMPRESSORS = {"plain": bytes, "gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress, "zip": zipped}
COMPRESSORS |= {kind: partial(pa.compress, codec=kind, asbytes=True) for kind in ("zstd", "lz4")}


TRUNCATED = r"raw: the \w+ archive is truncated.*Copy or download it again"


def cut(kind, kept):
    archive = COMPRESSORS[kind](TEXT)
    return archive[: int(len(archive) * kept)]


def flipped(kind):
    archive = bytearray(COMPRESSORS[kind](TEXT))
    archive[len(archive) // 2] ^= 0xFF
    return bytes(archive)


def surveyed(path, *, header=False, segment_samples=1000, report=lambda _: None, **options):
    source, _ = look(str(path))
    return survey(source, report, header=header, segment_samples=segment_samples, **options)


@pytest.mark.parametrize("kind", COMPRESSORS)
@pytest.mark.parametrize("members", [1, 3])
def test_every_compression_is_recognized_by_content(tmp_path, kind, members):
    path = tmp_path / "file.txt"
    members = 1 if kind == "zip" else members
    third = len(TEXT) // members + 1
    path.write_bytes(b"".join(COMPRESSORS[kind](TEXT[start : start + third]) for start in range(0, len(TEXT), third)))
    reported = []
    file = surveyed(path, block_bytes=5000, report=reported.append)
    size = path.stat().st_size
    assert b"".join(block.data for block in blocks(file.segments)) == TEXT
    assert file.samples == sum(segment.samples for segment in file.segments) == 3000
    assert sum(segment.file_bytes for segment in file.segments) == sum(reported) == size
    assert file.source.first_line == TEXT.splitlines()[0]
    assert len(file.segments) > 5


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_segments_are_read_in_any_order(tmp_path, kind):
    """Segments may repeat, be left out and alternate between files."""
    contents = {str(tmp_path / name): TEXT[start:] for name, start in (("a", 0), ("b", len(TEXT) // 2))}
    found = []
    for path, content in contents.items():
        Path(path).write_bytes(COMPRESSORS[kind](content))
        found += surveyed(path, block_bytes=3000, segment_samples=200).segments
    order = random.Random(3).choices(found, k=2 * len(found))
    for segment, block in zip(order, blocks(order), strict=True):
        text = contents[segment.source.path]
        assert block.data == text[segment.offset : segment.offset + segment.size]
        assert (block.samples, block.first_place) == (block.data.count(b"\n"), text[: segment.offset].count(b"\n") + 1)


def saved(save, *arrays, **named):
    file = io.BytesIO()
    save(file, *arrays, **named)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (zipped(TEXT, **{"b.csv": "b"}), r"the zip archive has 2 files \(logs/clicks.csv, b.csv\), must have one"),
        (zipped(TEXT)[:-100], "the zip archive is damaged"),
        (b"ORC\x00" * 9, "is an ORC file; convert it to Parquet"),
        (b"\xff\xff\xff\xff" * 9, "is an Arrow stream; write it as an Arrow file"),
        (pickle.dumps({"click": [0, 1]}), "is a pickle; write the table with pandas' to_parquet"),
        (saved(np.save, np.zeros(3)), "is a NumPy array; write it as a Parquet file"),
        (
            saved(np.savez, a=np.zeros(3), b=np.ones(3)),
            "is an archive of NumPy arrays; write the arrays as the columns",
        ),
        (zipped(TEXT, **{"xl/workbook.xml": "<a/>"}), "is an Excel workbook; save the sheet as CSV"),
        (struct.pack("<QI", 24, 7) + b"\n\x16\n\x14label", "is a TFRecord file; convert it to Parquet"),
        (gzip.compress(tarred(TEXT)), "it is a tar archive; extract the files"),
        (b"7z\xbc\xaf'\x1c\x00\x04" + TEXT, "is a 7z archive; extract it"),
        (b"Rar!\x1a\x07\x01\x00" + TEXT, "is a RAR archive; extract it"),
        *((cut(kind, kept), TRUNCATED) for kind, kept in (("gz", 0.3), ("xz", 0.99), ("zstd", 0.99), ("bz2", 0.3))),
        *((flipped(kind), r"raw: the \w+ archive is (damaged|truncated)") for kind in ("gz", "xz", "bz2", "zip")),
    ],
    ids=range(20),
)
def test_damaged_archives_and_other_formats_are_refused(tmp_path, content, message):
    (tmp_path / "raw").write_bytes(content)
    refused(message, surveyed, tmp_path / "raw")


HEADERS = ["PARENT_ID,x", "PAR1,x", "ARROW1,x", "FEA1\x01x", "ORCHARD\tx", "PARE", "ORC,PAR1", "7z,Rar!"]


@pytest.mark.parametrize("header", [*HEADERS, "u" * 256 + "mustard"])
def test_text_may_begin_as_another_format(tmp_path, header):
    (tmp_path / "raw").write_text(f"{header}\n1,2\n")
    assert look(str(tmp_path / "raw"))[0].first_line == header.encode()


@pytest.mark.parametrize("block_bytes", [80, 1 << 20])
def test_repeated_headers_and_empty_lines_at_the_end_are_no_samples(tmp_path, block_bytes):
    """Archives with a header each are joined; one has a byte order mark and Windows' line endings."""
    parts = [
        b"id,click\n1,0\n\n2,0\n",
        b"\xef\xbb\xbfid,click\r\n3,1\r\n",
        b"id,click\nid,clicks\n4,id,click\n\r\n\n\n",
    ]
    (tmp_path / "raw").write_bytes(b"".join(map(gzip.compress, parts)))
    file = surveyed(tmp_path / "raw", header=True, block_bytes=block_bytes)
    found = [
        (block.first_place + n, line)
        for block in blocks(file.segments)
        for n, line in enumerate(block.data.splitlines())
    ]
    assert found == [(2, b"1,0"), (3, b""), (4, b"2,0"), (6, b"3,1"), (8, b"id,clicks"), (9, b"4,id,click")]
    assert file.samples == 6


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(["", "a", "bc", "é"]), min_size=1, max_size=20), min_size=1, max_size=3),
    st.integers(60, 100),
    st.integers(1, 30),
    st.booleans(),
)
def test_blocks_have_exact_line_and_sample_numbers(tmp_path_factory, files, block_bytes, segment_samples, header):
    folder = tmp_path_factory.mktemp("raw")
    paths = []
    for number, lines in enumerate(files):
        paths.append(folder / str(number))
        lines[-1] += "x"  # the last line has no newline, so it must not be empty
        paths[-1].write_bytes("\n".join(["header"] * header + lines).encode())
    raw = [surveyed(path, header=header, segment_samples=segment_samples, block_bytes=block_bytes) for path in paths]
    sample = 0
    found = {str(path): b"" for path in paths}
    parts = partitions(raw, segment_samples)
    assert [part.number for part in parts] == list(range(len(parts)))
    for part in parts:
        assert sum(segment.samples for segment in part.segments) <= segment_samples
        for block in blocks(part.segments):
            before = found[block.source.path].count(b"\n")
            assert block.first_place == before + 1 + header
            assert block.first_sample == sample
            assert block.samples == block.data.count(b"\n")
            assert block.data[-1:] == b"\n"
            found[block.source.path] += block.data
            sample += block.samples
    assert list(found.values()) == [("\n".join(lines) + "\n").encode() for lines in files]
    assert [file.samples for file in raw] == [len(lines) for lines in files]


def write_rows(path, rows=3000):
    pq.write_table(pa.table({"n": range(rows)}), path)


@pytest.mark.parametrize(
    ("write", "change", "message"),
    [
        (lambda path: path.write_bytes(TEXT), lambda path: path.write_bytes(TEXT + b"more\n"), "changed while it was"),
        (write_rows, lambda path: write_rows(path, 2999), "changed while it was being read"),
        (write_rows, lambda path: path.unlink(), "was deleted after the survey"),
    ],
)
def test_a_file_that_changes_between_passes_is_noticed(tmp_path, write, change, message):
    path = tmp_path / "raw"
    write(path)
    segments = surveyed(path).segments
    change(path)
    refused(message, list, blocks(segments))
