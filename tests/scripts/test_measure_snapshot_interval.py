"""`scripts/measure_snapshot_interval.py`: a failed shard is restored from its snapshot, others are not; its lines."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from cowrec.data_pipeline import Reader, synthesize_drifting
from cowrec.trainer.config.run import load_config
from cowrec.trainer.runtime.processes import process_group
from cowrec.trainer.sharded_model.tables import tables_of
from cowrec.trainer.training.schedule import Schedule
from cowrec.trainer.training.state import TrainState
from sharded_case import moments

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("scripts.measure_snapshot_interval")


@pytest.mark.thorough
def test_lines_of_a_tiny_year(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "RUNS", ["never", "1h", "20d"])
    output = tmp_path / "snapshots.jsonl"
    monkeypatch.setattr(sys, "argv", ["x", "--output", str(output), "--rows", "6000", "--seeds", "1"])
    script.main()
    never, hour, days = (json.loads(line) for line in output.read_text().splitlines())
    assert never["failures"] == 0 < hour["failures"] == days["failures"]
    assert never["auc"] != days["auc"]
    for line in (never, hour, days):
        assert line["samples"] == 3000
        assert line["versions"]["torch"] == torch.__version__
        assert {"device", "threads", "git_commit", "config", "drift", "best_possible"} <= line.keys()
    assert "AUC lost" in capsys.readouterr().out
    before = output.read_text()
    script.main()
    assert output.read_text() == before, "an existing run was measured again"
    assert output.with_suffix(".png").stat().st_size > 10_000


def test_events_are_in_order_and_failures_follow_their_latest_snapshot(script):
    drift, interval = script.YEAR, 5 * 86400
    events = script.events_of(drift, interval)
    assert events == sorted(events)
    failures = [event for event in events if event.fails]
    assert [(event.time, event.shard) for event in failures] == [
        (event.time, event.shard) for event in script.events_of(drift, 3600) if event.fails
    ]
    assert 364 - 6 * 364**0.5 < len(failures) < 364 + 6 * 364**0.5  # six Poisson deviations
    for failure in failures:
        before = [
            each for each in events if not each.fails and each.shard == failure.shard and each.time <= failure.time
        ]
        assert 0 <= failure.time - before[-1].time < interval
        assert (before[-1].time - drift.start) % interval == 0


def test_only_the_failed_shard_is_restored(script, tmp_path):
    """Compares with copies of all tables and moments by name, as in a checkpoint."""
    synthesize_drifting(tmp_path, dataclasses.replace(script.YEAR, rows=640, days=10.0), test_rows=1)
    config = load_config(script.CONFIG, ["train.batch_size=64", "id_table.capacity=20000"])
    with process_group("cpu") as process:
        reader = Reader(tmp_path, "train", batch_size=64)
        trained = TrainState(config, reader.schema, process, Schedule())
        assert trained.adam is not None
        copies, snapshots = [], {}
        for step, batch in enumerate(reader.epoch(0)):
            if step in (4, 8):
                copies.append(state(trained))
                script.apply_event(script.Event(0, step == 8, 3), trained.adam, snapshots)
                if step == 8:
                    break
            script.train_on(trained, batch)
        then, now = copies
        for name, rows in state(trained).items():
            failed = torch.arange(len(rows)) % script.SHARDS == 3
            expected = torch.where(failed[:, None], then[name], now[name])
            torch.testing.assert_close(rows, expected, rtol=0, atol=0)
            assert not torch.equal(then[name][failed], now[name][failed])


def state(trained: TrainState) -> dict[str, torch.Tensor]:
    """Copies the tables' weights and moments."""
    assert trained.adam is not None
    values = tables_of(trained.model) | moments(trained.adam)
    return {name: value.local_shards()[0].tensor.clone() for name, value in values.items()}
