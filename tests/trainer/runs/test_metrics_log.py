"""The metrics of a run that does not end: files of limited size, also where the run is killed and resumed."""

import json
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cowrec.trainer.reports.run_curves import RunCurves
from cowrec.trainer.runs.metrics_log import MetricsLog


def steps(run: Path) -> list[int]:
    return RunCurves.read("run", run / "metrics.jsonl").series("loss")[0].astype(int).tolist()


def write(run: Path, first: int, last: int, resumed_at: int = 0) -> None:
    with MetricsLog(run, resumed_at, max_bytes=5000) as log:
        for step in range(first, last + 1):
            log.write("train", step, loss=1 / step, samples_per_second=1.0)


def test_metrics_keep_to_their_size_and_a_resumed_run_continues_them(tmp_path: Path) -> None:
    """From a checkpoint before the last time that the file was full; the run was killed in the middle of a line."""
    write(tmp_path, 1, 500)
    sizes = [file.stat().st_size for file in tmp_path.glob("metrics.jsonl*")]
    assert len(sizes) == 2
    assert max(sizes) <= 5000
    first, *_, last = steps(tmp_path)
    assert (steps(tmp_path), last) == (list(range(first, 501)), 500)
    current = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    checkpoint = current[0]["step"] - 5
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    write(tmp_path, checkpoint + 1, 520, resumed_at=checkpoint)
    found = steps(tmp_path)
    assert found == list(range(found[0], 521))
    assert found[0] <= 500


def test_files_of_tensorboard_are_removed_too(tmp_path: Path) -> None:
    write(tmp_path, 1, 500)
    files = list((tmp_path / "tensorboard").iterdir())
    assert len(files) == 2
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    shown = [event.step for event in board.Scalars("train/loss")]
    assert shown == steps(tmp_path)
