"""Raw files as blocks of lines: every compression, cut anywhere, whole or broken."""

import gzip
import lzma
import random

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cowrec.data_pipeline.sources import RawFiles

TEXT = "".join(f"{number},{random.Random(number).random()}\n" for number in range(3000)).encode()


def zstd(data):
    return pa.compress(data, codec="zstd", asbytes=True)


COMPRESSORS = {"plain": bytes, "gz": gzip.compress, "xz": lzma.compress, "zst": zstd}


def read(path, **options):
    return list(RawFiles([path], header=False).blocks(**options))


@pytest.mark.parametrize("kind", COMPRESSORS)
@pytest.mark.parametrize("members", [1, 3])
def test_every_compression_is_read_whatever_the_files_name(tmp_path, kind, members):
    path = tmp_path / "file.txt"
    third = len(TEXT) // members + 1
    path.write_bytes(b"".join(COMPRESSORS[kind](TEXT[start : start + third]) for start in range(0, len(TEXT), third)))
    blocks = read(path, block_bytes=5000)
    assert b"".join(block.data for block in blocks) == TEXT
    assert sum(block.lines for block in blocks) == 3000
    assert sum(block.file_bytes for block in blocks) == path.stat().st_size
    assert len(blocks) > 5


@pytest.mark.parametrize("kind", ["gz", "xz", "zst"])
@pytest.mark.parametrize("kept", [0.3, 0.99])
def test_a_truncated_archive_is_refused(tmp_path, kind, kept):
    path = tmp_path / "raw"
    whole = COMPRESSORS[kind](TEXT)
    path.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(ValueError, match=r"raw: the \w+ archive is truncated.*Copy or download it again"):
        read(path)


@pytest.mark.parametrize("kind", ["gz", "xz"])
def test_a_damaged_archive_is_refused(tmp_path, kind):
    path = tmp_path / "raw"
    whole = bytearray(COMPRESSORS[kind](TEXT))
    whole[len(whole) // 2] ^= 0xFF
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=r"raw: the \w+ archive is (damaged|truncated)"):
        read(path)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(["", "a", "bc", "é"]), min_size=1, max_size=20), min_size=1, max_size=3),
    st.integers(60, 100),
    st.booleans(),
)
def test_blocks_know_their_lines_and_rows(tmp_path_factory, files, block_bytes, header):
    folder = tmp_path_factory.mktemp("raw")
    paths = []
    for number, lines in enumerate(files):
        paths.append(folder / str(number))
        lines[-1] += "x"  # the last line has no newline, so it must not be empty
        paths[-1].write_bytes("\n".join(["header"] * header + lines).encode())
    raw = RawFiles(paths, header=header)
    for _ in range(2):
        row = 0
        found = {str(path): b"" for path in paths}
        for block in raw.blocks(block_bytes=block_bytes):
            before = found[block.path].count(b"\n")
            assert block.first_line == before + 1 + header
            assert block.first_row == row
            assert block.lines == block.data.count(b"\n")
            assert block.data[-1:] in (b"\n", b"")
            found[block.path] += block.data
            row += block.lines
        assert list(found.values()) == [("\n".join(lines) + "\n").encode() for lines in files]
        assert raw.rows == {str(path): len(lines) for path, lines in zip(paths, files, strict=True)}


def test_a_file_that_changes_between_passes_is_noticed(tmp_path):
    path = tmp_path / "raw"
    path.write_bytes(TEXT)
    raw = RawFiles([path], header=False)
    list(raw.blocks())
    path.write_bytes(TEXT + b"more\n")
    with pytest.raises(ValueError, match="changed while it was being read"):
        list(raw.blocks())
