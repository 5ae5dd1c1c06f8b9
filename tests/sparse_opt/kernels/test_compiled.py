"""Kernels kept on disk."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CALLER = """
from cowrec.sparse_opt.id_tables.kernels.hashing import scaled
from .compiled import compiled

@compiled()
def eighth(bits):
    return scaled(bits, 8)
"""
PROGRAM = """
import sys, types
import numpy as np
sys.modules["cowrec"] = types.ModuleType("cowrec")
sys.modules["cowrec"].__path__ = sys.argv[1:]
from cowrec.sparse_opt.kernels.caller import eighth
print(eighth(np.uint64(1 << 31)), sum(eighth.stats.cache_hits.values()))
"""


@pytest.mark.thorough
def test_kernel_is_compiled_again_when_a_function_of_another_file_changes(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    folder = shutil.copytree(ROOT / "sparse_opt", tmp_path / "sparse_opt", ignore=ignored)
    (folder / "kernels" / "caller.py").write_text(CALLER, encoding="utf-8")

    def result_and_hits() -> list[str]:
        command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        is_compiled = done.stdout.split()[1] == "0"
        assert done.stderr.count("compiling kernels for this machine's CPU: about half a minute") == is_compiled
        return done.stdout.split()

    assert result_and_hits() == ["4", "0"]
    assert result_and_hits() == ["4", "1"]
    hashing = folder / "id_tables" / "kernels" / "hashing.py"
    source = hashing.read_text(encoding="utf-8")
    changed = source.replace("* np.uint64(size)) >> _32", "* np.uint64(size)) >> np.uint64(31)")
    assert changed != source
    hashing.write_text(changed, encoding="utf-8")
    assert result_and_hits() == ["8", "0"]
    assert result_and_hits() == ["8", "1"]
