"""Atomic replacement, locks, and files of lines of limited size."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cowrec.files import append_line, earlier, locked, locked_folder, read_lines, replace_file, replacing
from refusal import refused


def test_a_file_is_replaced_or_kept(tmp_path):
    file = tmp_path / "file"
    replace_file(file, b"first")
    with pytest.raises(TypeError), replacing(file) as opened:
        opened.writelines([b"half of the sec", None])
    assert file.read_bytes() == b"first"
    replace_file(file, b"second")
    assert file.read_bytes() == b"second"
    assert os.listdir(tmp_path) == ["file"]
    (tmp_path / "link").symlink_to("file")
    replace_file(tmp_path / "link", b"third")
    assert (file.read_bytes(), file.is_symlink(), (tmp_path / "link").is_symlink()) == (b"third", False, True)
    (tmp_path / "file.partial").write_bytes(b"of a killed process, and longer")
    with replacing(file) as one:
        one.write(b"by one")
        refused("is being written by another process", replace_file, file, b"other")
    assert file.read_bytes() == b"by one"
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_a_lock_excludes_others_until_its_process_ends(tmp_path):
    code = f"""
import sys
from pathlib import Path
from cowrec.files import locked_folder
with locked_folder(Path({str(tmp_path / "new")!r})):
    print("locked", flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"locked\n"
        with (
            pytest.raises(ValueError, match=r"another process is at work in .*new; wait for it"),
            locked_folder(tmp_path / "new"),
        ):
            pass
        with pytest.raises(ValueError, match=r"^busy$"), locked(tmp_path / "new", "busy"):
            pass
        other.kill()
    with locked_folder(tmp_path / "new"):
        (tmp_path / "new" / "file").touch()
    file = tmp_path / "new" / "file"
    with pytest.raises(ValueError, match="file is a file; choose another folder"), locked_folder(file):
        pass


def numbers(path: Path) -> list[int]:
    return [int(line) for line in read_lines(path)]


def test_a_reader_sees_the_last_lines_without_gap_or_repetition(tmp_path: Path) -> None:
    """While a thread writes and the file is renamed every few hundred lines."""
    path, written, seen = tmp_path / "log", 5_000, 0

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
