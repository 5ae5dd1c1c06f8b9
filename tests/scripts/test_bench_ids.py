"""`scripts/bench_ids.py`: its lines, and equal work of all implementations."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["cowrec", "cowrec-full", "dict", "searchsorted", "torchrec-mch"]


def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("scripts.bench_ids")


def test_lines_of_a_tiny_run(tmp_path, monkeypatch, capsys):
    output = tmp_path / "ids.jsonl"
    what = ["--resident", "2000", "--batch", "100", "--rounds", "2", "--only", "cowrec,searchsorted"]
    monkeypatch.setattr(sys, "argv", ["bench_ids.py", "--output", str(output), *what])
    script(monkeypatch).main()
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    kinds = [(share, drawn) for share in (0.0, 0.01, 0.1) for drawn in ("evenly", "zipf")]
    assert [(line["new_share"], line["drawn"]) for line in lines] == kinds * 2
    assert [line["subject"] for line in lines] == ["cowrec"] * 6 + ["searchsorted"] * 6
    for line in lines:
        assert (line["resident"], line["batch"], line["rounds"], line["error"]) == (2000, 100, 2, None)
        low, high = line["ids_per_second_quartiles"]
        assert 0 < low <= line["ids_per_second"] <= high
        assert line["ids_per_cpu_second"] > 0
        assert line["versions"]["torch"] == torch.__version__
        assert {"device", "threads", "cores", "git_commit", "bytes_per_id", "fill_seconds"} <= line.keys()
    assert "searchsorted" in capsys.readouterr().out


def test_an_unknown_name_is_a_user_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench_ids.py", "--output", str(tmp_path / "x"), "--only", "dicts"])
    with pytest.raises(SystemExit, match="did you mean 'dict'"):
        script(monkeypatch).main()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "cowrec-full"])
def test_all_give_each_id_its_own_row(monkeypatch, name):
    """Filled ids have distinct rows, keep them when new ids arrive, and new ids get others."""
    subject = script(monkeypatch).SUBJECTS[name](1000)
    ids = np.random.default_rng(0).integers(2, 2**62, 1000)
    subject.fill(ids)
    rows = np.array(subject.lookup(ids))
    assert len(set(rows.tolist())) == 1000
    mixed = np.concatenate([ids[:50], np.arange(2**62, 2**62 + 50)])
    for _ in range(subject.batches):
        assigned = np.array(subject.assign(mixed))
    assert (assigned[:50] == rows[:50]).all()
    assert len(set(assigned.tolist())) == 100
    assert (np.array(subject.lookup(mixed)) == assigned).all()
