"""Atomic replacement and locks of `data_pipeline.files`."""

import os
import subprocess
import sys

import pytest

from cowrec.data_pipeline.files import locked, locked_folder, replace_file, replacing


def test_a_file_is_replaced_or_kept(tmp_path):
    file = tmp_path / "file"
    replace_file(file, b"first")
    with pytest.raises(TypeError), replacing(file) as opened:
        opened.writelines([b"half of the sec", None])
    assert file.read_bytes() == b"first"
    replace_file(file, b"second")
    assert file.read_bytes() == b"second"
    assert os.listdir(tmp_path) == ["file"]


def test_a_lock_excludes_others_until_its_process_ends(tmp_path):
    code = f"""
import sys
from pathlib import Path
from cowrec.data_pipeline.files import locked_folder
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
        pass


def test_a_file_is_not_locked_as_a_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is a file; choose another folder"), locked_folder(tmp_path / "file"):
        pass
