"""Raw files as blocks of lines: all compressions, any boundaries, intact or damaged."""

import gzip
import hashlib
import lzma
import random
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cowrec.data_pipeline.raw.partitions import blocks, partitions, read_first_line, survey

TEXT = "".join(f"{number},{random.Random(number).random()}\n" for number in range(3000)).encode()


def zstd(data):
    return pa.compress(data, codec="zstd", asbytes=True)


COMPRESSORS = {"plain": bytes, "gz": gzip.compress, "xz": lzma.compress, "zst": zstd}


def surveyed(path, *, header=False, segment_lines=1000, report=lambda _: None, **options):
    return survey(str(path), report, header=header, segment_lines=segment_lines, **options)


@pytest.mark.parametrize("kind", COMPRESSORS)
@pytest.mark.parametrize("members", [1, 3])
def test_every_compression_is_recognized_by_content(tmp_path, kind, members):
    path = tmp_path / "file.txt"
    third = len(TEXT) // members + 1
    path.write_bytes(b"".join(COMPRESSORS[kind](TEXT[start : start + third]) for start in range(0, len(TEXT), third)))
    reported = []
    file = surveyed(path, block_bytes=5000, report=reported.append)
    size = path.stat().st_size
    assert b"".join(block.data for block in blocks(file.segments)) == TEXT
    assert file.samples == sum(segment.lines for segment in file.segments) == 3000
    assert sum(segment.file_bytes for segment in file.segments) == sum(reported) == size
    assert file.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert read_first_line(str(path)) == file.first_line == TEXT.splitlines()[0]
    assert len(file.segments) > 5


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_segments_are_read_in_any_order(tmp_path, kind):
    """Segments may repeat, be left out and alternate between files."""
    contents = {str(tmp_path / name): TEXT[start:] for name, start in (("a", 0), ("b", len(TEXT) // 2))}
    found = []
    for path, content in contents.items():
        Path(path).write_bytes(COMPRESSORS[kind](content))
        found += surveyed(path, block_bytes=3000, segment_lines=200).segments
    order = random.Random(3).choices(found, k=2 * len(found))
    for segment, block in zip(order, blocks(order), strict=True):
        text = contents[segment.path]
        assert block.data == text[segment.offset : segment.offset + segment.size]
        assert (block.lines, block.first_line) == (block.data.count(b"\n"), text[: segment.offset].count(b"\n") + 1)


@pytest.mark.parametrize("kind", ["gz", "xz", "zst"])
@pytest.mark.parametrize("kept", [0.3, 0.99])
def test_a_truncated_archive_is_refused(tmp_path, kind, kept):
    path = tmp_path / "raw"
    archive = COMPRESSORS[kind](TEXT)
    path.write_bytes(archive[: int(len(archive) * kept)])
    with pytest.raises(ValueError, match=r"raw: the \w+ archive is truncated.*Copy or download it again"):
        surveyed(path)


@pytest.mark.parametrize("kind", ["gz", "xz"])
def test_a_damaged_archive_is_refused(tmp_path, kind):
    path = tmp_path / "raw"
    archive = bytearray(COMPRESSORS[kind](TEXT))
    archive[len(archive) // 2] ^= 0xFF
    path.write_bytes(archive)
    with pytest.raises(ValueError, match=r"raw: the \w+ archive is (damaged|truncated)"):
        surveyed(path)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(["", "a", "bc", "é"]), min_size=1, max_size=20), min_size=1, max_size=3),
    st.integers(60, 100),
    st.integers(1, 30),
    st.booleans(),
)
def test_blocks_have_exact_line_and_sample_numbers(tmp_path_factory, files, block_bytes, segment_lines, header):
    folder = tmp_path_factory.mktemp("raw")
    paths = []
    for number, lines in enumerate(files):
        paths.append(folder / str(number))
        lines[-1] += "x"  # the last line has no newline, so it must not be empty
        paths[-1].write_bytes("\n".join(["header"] * header + lines).encode())
    raw = [surveyed(path, header=header, segment_lines=segment_lines, block_bytes=block_bytes) for path in paths]
    sample = 0
    found = {str(path): b"" for path in paths}
    parts = partitions(raw, segment_lines)
    assert [part.number for part in parts] == list(range(len(parts)))
    for part in parts:
        assert sum(segment.lines for segment in part.segments) <= segment_lines
        for block in blocks(part.segments):
            before = found[block.path].count(b"\n")
            assert block.first_line == before + 1 + header
            assert block.first_sample == sample
            assert block.lines == block.data.count(b"\n")
            assert block.data[-1:] == b"\n"
            found[block.path] += block.data
            sample += block.lines
    assert list(found.values()) == [("\n".join(lines) + "\n").encode() for lines in files]
    assert [file.samples for file in raw] == [len(lines) for lines in files]


def test_partitions_are_filled_to_their_size(tmp_path):
    """All partitions of a file but the last are full, wherever blocks end; small files share a partition."""
    (tmp_path / "raw").write_bytes(TEXT)
    parts = partitions([surveyed(tmp_path / "raw", segment_lines=700, block_bytes=3000)], 700)
    assert [sum(segment.lines for segment in part.segments) for part in parts] == [700, 700, 700, 700, 200]
    parts = partitions([surveyed(tmp_path / "raw", segment_lines=7000)] * 5, 7000)
    assert [len(part.segments) for part in parts] == [2, 2, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_bytes(TEXT + b"more\n"), "changed while it was being read"),
        (lambda path: path.unlink(), "was deleted after the survey"),
    ],
)
def test_a_file_that_changes_between_passes_is_noticed(tmp_path, change, message):
    path = tmp_path / "raw"
    path.write_bytes(TEXT)
    segments = surveyed(path).segments
    change(path)
    with pytest.raises(ValueError, match=message):
        list(blocks(segments))
