"""`scripts/measure_id_lifetimes.py`: each setting removes ids as it should; lines and plot of a tiny year."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
REMOVED = ("below_threshold", "expired", "evicted", "refused")
TINY = ["--rows", "6000", "--new-ids", "0.02", "--seeds", "1"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("scripts.measure_id_lifetimes")


def test_lines_of_a_tiny_year(script, tmp_path, monkeypatch, capsys):
    """Each setting has fewer rows than the run that keeps all ids; bytes are those of the maximum rows."""
    runs = [("", script.ALL), ("admission", "count 4"), ("expiry", "20d"), ("capacity", "refuse 10%")]
    monkeypatch.setattr(script, "RUNS", runs)
    output = tmp_path / "lives.jsonl"
    monkeypatch.setattr(sys, "argv", ["measure_id_lifetimes.py", "--output", str(output), *TINY])
    script.main()
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(line["panel"], line["setting"]) for line in lines] == runs
    everything, *others = lines
    assert everything["resident"] == everything["most_resident"] == everything["ids_seen"]
    assert all(line["resident"] <= line["most_resident"] < everything["ids_seen"] for line in others)
    counted = 6 * 2 * (1 << 20)  # fields, bytes and cells of a counter
    for line in lines:
        # 8 columns and the wide weight in a row of 12; weights and two moments; 22 of the id table.
        rows = line["bytes"] - counted * (line["setting"] == "count 4")
        assert rows == line["most_resident"] * (3 * 12 * 4 + 22)
        assert line["samples"] == 3000
        assert 0 < line["auc"] < 1 > line["best_possible"]["auc"] > 0.5
        assert line["versions"]["torch"] == torch.__version__
        assert {"device", "threads", "git_commit", "config", "drift", "counters"} <= line.keys()
    removed = {
        line["setting"]: {key for key in REMOVED if any(counts[key] for counts in line["counters"].values())}
        for line in lines
    }
    assert removed == {
        script.ALL: set(),
        "count 4": {"below_threshold"},
        "20d": {"expired"},
        "refuse 10%": {"refused"},
    }
    before = output.read_text()
    assert "plot: " in capsys.readouterr().out
    script.main()
    assert output.read_text() == before, "an existing run was measured again"
    assert output.with_suffix(".png").stat().st_size > 10_000


def test_ids_seen_are_those_of_the_stream(script, tmp_path):
    drift = script.year(3, 6000, 0.02)
    script.write_year(drift, tmp_path)
    table = pq.read_table(tmp_path / "incoming")
    assert script.ids_seen(drift) == {f"C{n}": len(set(table[f"C{n}"].to_pylist())) for n in range(1, 7)}
    assert (np.diff(table["time"].to_numpy()) >= 0).all()
    assert table.num_rows == 6000
