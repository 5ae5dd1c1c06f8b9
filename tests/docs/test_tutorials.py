"""The tutorials under docs/tutorials run, and print what they promise."""

import contextlib
import io
import os
import runpy
import sys
from pathlib import Path

import pytest

from process_groups import in_processes

TUTORIALS = Path(__file__).resolve().parents[2] / "docs" / "tutorials"
PROMISES = {
    "own_data": ("5,361 training samples", "GAUC by topics", "Tuesday: mean prediction"),
    "plug_in": ("step 60: loss", "row updates were clipped", "Hyperparameters(embedding_lr="),
    "throughput": ("best possible AUC", "batch    64, rule half_life", "batch   512, rule none"),
}


def test_every_tutorial_is_run() -> None:
    assert {file.stem for file in TUTORIALS.glob("*.py")} == set(PROMISES)


@pytest.mark.parametrize("name", PROMISES)
def test_a_tutorial_prints_what_it_promises(name: str, tmp_path: Path) -> None:
    in_processes(_run, (str(TUTORIALS / f"{name}.py"), str(tmp_path)), 1)
    printed = (tmp_path / "printed").read_text()
    assert all(text in printed for text in PROMISES[name]), printed


def _run(rank: int, tutorial: str, folder: str) -> None:
    sys.argv = [tutorial, folder]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(tutorial, run_name="__main__")
    Path(folder, "printed").write_text(printed.getvalue())
    os._exit(0)  # see process_groups
