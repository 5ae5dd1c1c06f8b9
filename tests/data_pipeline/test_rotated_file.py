"""A file of lines of limited size, read while it is written."""

import threading
from pathlib import Path

import pytest

from cowrec.data_pipeline.rotated_file import append_line, earlier, read_lines


def numbers(path: Path) -> list[int]:
    return [int(line) for line in read_lines(path)]


def test_a_reader_sees_the_last_lines_without_gap_or_repetition(tmp_path: Path) -> None:
    """While a thread writes and the file is renamed every few hundred lines."""
    path, written, seen = tmp_path / "log", 20_000, 0

    def write() -> None:
        for number in range(written):
            append_line(path, b"%08d\n" % number, 3000)

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        if not path.exists():
            continue
        found = numbers(path)
        if not found:  # the first line is being written
            assert not seen
            continue
        assert found == list(range(found[0], found[0] + len(found)))
        assert found[-1] >= seen
        seen = found[-1]
    writer.join()
    found = numbers(path)
    assert found == list(range(written - len(found), written))
    assert len(found) > 3000 // 9, "both files"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["log", "log.1"]
    assert max(file.stat().st_size for file in tmp_path.iterdir()) <= 3000


def test_incomplete_lines_long_lines_and_missing_files(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with pytest.raises(FileNotFoundError):
        read_lines(path)
    assert not append_line(path, b"a" * 99 + b"\n", 10), "an empty file takes any line"
    assert append_line(path, b"b\n", 10)
    path.unlink()  # as after a kill between the two steps
    assert read_lines(path) == [b"a" * 99 + b"\n"]
    assert not append_line(path, b"c\n", 10)
    with path.open("ab") as file:
        file.write(b"half a li")
    assert read_lines(path) == [b"a" * 99 + b"\n", b"c\n"]
    assert earlier(path).name == "log.1"
    for _ in range(99):
        assert not append_line(path, b"d\n", 0), "no limit"
