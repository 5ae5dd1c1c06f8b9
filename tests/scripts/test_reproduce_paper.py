"""`reproduce_paper.sh` end to end on a few lines: killed in a run, continued, and its table and plot."""

import json
import lzma
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from raw_cases import write_criteo
from scripts.paper import report as paper_report
from scripts.paper import settings as paper_settings

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "reproduce_paper.sh"
REAL = ROOT.parent / "shared" / "data" / "criteo_8k.tsv.xz"
SMALL = {"REPRODUCE_MODELS": "deepfm", "REPRODUCE_BATCHES": "1K", "REPRODUCE_EPOCHS": "2", "OMP_NUM_THREADS": "1"}


DEFAULTS = {
    "REPRODUCE_MODELS": "deepfm wdl",
    "REPRODUCE_BATCHES": "512 1K",
    "REPRODUCE_EPOCHS": "10",
    "REPRODUCE_SEEDS": "1",
    "REPRODUCE_BASELINE": "linear,sqrt",
    "REPRODUCE_MIN_COUNT": "1",
}


def start(train: Path, output: Path, **settings: str) -> subprocess.Popen[str]:
    """Starts the script in a group of its own, with the python of this test."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, **SMALL, **settings, "PATH": path}
    command = ["bash", str(SCRIPT), str(train), str(output)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes)


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


def rows(table: str) -> dict[str, list[str]]:
    """The cells of a table's lines by their first cell."""
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    return {row[0]: row[1:] for row in found}


@pytest.mark.thorough
def test_a_stopped_script_continues(tmp_path: Path) -> None:
    """Stopped in the second of two runs; the first is not repeated, and other settings are refused. On real lines."""
    raw, output = tmp_path / "train.txt", tmp_path / "out"
    if REAL.exists():
        with lzma.open(REAL, "rt") as file:
            raw.write_text("".join(line for line, _ in zip(file, range(3000), strict=False)))
    else:
        write_criteo(raw, 3000)
    first, second = (output / method / "deepfm" for method in ("cowclip", "baseline"))
    process = start(raw, output)
    wait_for((second / "runs").exists, process)
    os.kill(process.pid, signal.SIGTERM)
    # The pipe closes with the last process, so none is left behind.
    said = process.communicate(timeout=600)[0]
    assert process.returncode == 143
    assert said.endswith("\nstopped; the same command continues\n")
    assert "Traceback" not in said
    assert "0 of 2 runs done; the time they take is estimated after the first" in said
    assert re.search(r"1 of 2 runs done; about \d+ (s|min) of training left", said)
    done, prepared = lines(first / "sweep.jsonl"), (output / "data" / "schema.json").stat().st_mtime_ns
    assert not (second / "sweep.jsonl").exists()

    with pytest.raises(ValueError, match=r"settings\.json has REPRODUCE_EPOCHS = 2, but 10 is given; give the same"):
        paper_settings.keep(raw, output, DEFAULTS)
    said = start(raw, output).communicate()[0]
    assert (output / "data" / "schema.json").stat().st_mtime_ns == prepared
    assert lines(first / "sweep.jsonl") == done
    assert "run 1 of 1: cowclip" not in said
    assert "2 of 2 runs done; all done" in said
    (line,) = lines(second / "sweep.jsonl")
    assert (line["clip"], line["rule"], line["batch_size"], line["epochs"]) == ("off", "linear", 1024, 2)
    # The published baseline's dense rate is 1e-4 at 1K; CowClip's is 8e-4.
    assert line["dense_lr"] == pytest.approx(1e-4)
    assert done[0]["dense_lr"] == pytest.approx(8e-4)
    table = (output / "table.md").read_text()
    assert said.endswith(table)
    cells = [cell.split(" / ") for cell in rows(table)["1K"]]
    assert [cells[0][0], cells[3][0]] == [f"{measured['auc']:.4f}" for measured in (done[0], line)]
    assert [theirs for _, theirs in cells] == ["0.8086", "0.4430", "768", "0.8076", "0.4438", "-"]
    assert "**Not comparable:**" in table
    image = plt.imread(output / "plot.png")
    assert min(image.shape[:2]) > 400
    assert image.std() > 0


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.txt").touch()
    wrong = start(tmp_path / "train.txt", tmp_path / "out", REPRODUCE_SEEDS="0")
    process = start(tmp_path / "none.txt", tmp_path / "out")
    assert "TRAIN_TXT must be a file" in process.communicate()[0]
    assert process.returncode == 2
    said = wrong.communicate()[0]
    assert said == "reproduce_paper.sh: REPRODUCE_SEEDS is '0', but must be a whole number of at least 1\n"
    assert wrong.returncode == 2
    assert not (tmp_path / "out").exists()


WRONG = {
    "MODELS": ["deepfm,wdl", "lstm", " ", "wdl wdl"],
    "BATCHES": ["abc", "2K,4K", "0", "1K 1024"],
    "EPOCHS": ["x", "0"],
    "BASELINE": ["linear sqrt", "cubic"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_wrong_settings_are_refused(name: str, value: str) -> None:
    paper_settings.check(DEFAULTS)
    with pytest.raises(ValueError, match=f"REPRODUCE_{name} is '{value}', but must be "):
        paper_settings.check({**DEFAULTS, f"REPRODUCE_{name}": value})


def test_failed_runs_and_seeds_in_the_table() -> None:
    def line(batch_size: int, clip: str, **values: object) -> dict:
        return {"model": "deepfm", "clip": clip, "rule": "linear", "batch_size": batch_size, **values}

    good = [line(2048, "off", auc=auc, logloss=0.45, train_seconds=90.0) for auc in (0.79, 0.81)]
    results = paper_report.results_of([*good, line(1024, "off", error="NonFiniteLoss: ...")])
    published = paper_report.read_published()
    cells = rows(paper_report.markdown(results, published, {(41_256_555, 10, "a GPU")}))
    assert cells["2K"] == ["0.8000 ± 0.0141 / -", "0.4500 ± 0.0000 / -", "1.5 / -"]
    assert cells["1K"] == ["failed / 0.8076", "failed / 0.4438", "failed / -"]
    assert "Not comparable" not in paper_report.markdown(results, published, {(41_256_555, 10, "a GPU")})
    # 4K takes 204 minutes where 2K takes 390.
    waiting = [*results, paper_report.Cell("deepfm", "off", "linear", 4096)]
    said = paper_report.progress(waiting, results, published, 2)
    left = 1.5 * 768 / 390 + 2 * 1.5 * 204 / 390
    assert said.endswith(f": 3 of 6 runs done, 1 failed; about {left:.0f} min of training left")
