"""The soak of an hour, for seconds: real processes, a few faults, and the comparison with an undisturbed run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_cases import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[3]


def soak(output: Path, *options: str) -> tuple[int, list[dict], str]:
    """Runs the soak; returns its exit code, its lines and what it printed."""
    command = [sys.executable, "-m", "scripts.soak", "--output", str(output), "--quiet-seconds", "5", *options]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    return done.returncode, lines, done.stdout + done.stderr


@pytest.mark.thorough
def test_kills_lose_nothing_and_every_fault_has_a_line(tmp_path: Path) -> None:
    faults = ["kill_redis", "kill_trainer", "duplicate_samples", "malformed_samples", "large_numbers"]
    given = ["--minutes", "0.1", "--fault-seconds", "1.2", "--faults", ",".join(faults), "--rate", "200"]
    code, lines, printed = soak(tmp_path / "soak.jsonl", *given)
    assert code == 0, printed
    *lines, summary = lines
    assert [line["kind"] for line in lines] == ["fault", "minute"] * len(faults)
    assert sorted(line["fault"] for line in lines[::2]) == sorted(faults)
    assert summary["passed"]
    assert all(summary["checks"].values())
    assert summary["expected"]["malformed"] > 10
    assert summary["expected"]["duplicates"] >= 500
    assert summary["counters"]["handed_out"] == summary["expected"]["valid"] > 1000
    assert summary["git_commit"]
    assert (tmp_path / "soak.png").stat().st_size > 10_000


@pytest.fixture
def scripts_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts are not installed."""
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])


@pytest.mark.usefixtures("scripts_on_path")
def test_each_fault_comes_once_before_any_comes_again() -> None:
    from scripts.soak.faults import FAULTS, Faults, planned

    plan = planned(0, 2 * len(FAULTS) + 3)
    assert len(plan) == 2 * len(FAULTS) + 3
    assert set(plan[: len(FAULTS)]) == set(plan[len(FAULTS) : 2 * len(FAULTS)]) == set(FAULTS)
    assert plan == planned(0, len(plan)) != planned(1, len(plan))
    assert all(callable(getattr(Faults, name)) for name in FAULTS)


@pytest.mark.usefixtures("scripts_on_path")
def test_memory_that_grows_is_told_from_memory_that_does_not() -> None:
    """An untouched server that grows by 60 MiB an hour, and a trainer killed again and again that does not."""
    from scripts.soak.report import memory_trends

    lines: list[dict] = []
    for minute in range(60):
        fault = "kill_trainer" if minute % 6 == 0 else "late_samples"
        sizes = {"server": 500.0 + minute, "trainer": 700.0 - 100 * (minute % 6 < 2)}
        lines.append({"kind": "fault", "minute": float(minute), "fault": fault, "restarted": []})
        lines.append({"kind": "minute", "minute": float(minute + 1), "rss_mb": sizes})
    found = memory_trends(lines)
    assert found["server_mb_per_hour"] == {"slope": 60.0, "noise": 0.0}
    assert found["trainer_mb_per_hour_within_lives"] == {"slope": 0.0, "noise": 0.0}
    assert found["trainer_mb_per_hour_between_lives"] == {"slope": 0.0, "noise": 0.0}
    assert found["trainer_lives"] == 10
    for line in lines[1::2]:
        line["rss_mb"]["trainer"] += 0.5 * line["minute"] + (line["minute"] % 2)
    grown = memory_trends(lines)["trainer_mb_per_hour_within_lives"]
    assert abs(grown["slope"] - 30) < 3 * grown["noise"] < 60
