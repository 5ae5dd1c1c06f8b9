"""The report of the large-batch study on lines as today's sweeps write them, without the AUC of training samples."""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from scripts.research.large_batch import report

STUDY = Path(__file__).resolve().parents[2] / "results" / "amd_epyc_2_cores" / "large_batch"


def write_study(folder: Path, *, train: bool) -> None:
    """Copies the lines of Criteo's rules and ten epochs, with or without measures of training samples."""
    for part in ("rules", "ten_epochs"):
        lines = [json.loads(line) for line in (STUDY / "criteo" / part / "sweep.jsonl").read_text().splitlines()]
        for line in lines if not train else ():
            line["by_epoch"] = [
                {key: value for key, value in each.items() if key != "train"} for each in line["by_epoch"]
            ]
        target = folder / "criteo" / part / "sweep.jsonl"
        target.parent.mkdir(parents=True)
        target.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("train", [False, True])
def test_plots_and_tables_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: bool) -> None:
    write_study(tmp_path, train=train)
    monkeypatch.setattr(sys, "argv", ["report.py", str(tmp_path)])
    report.main()
    widths = [plt.imread(tmp_path / f"{name}.png").shape[1] for name in ("rules", "by_id_counts", "by_epoch")]
    assert widths[2] == (1170 if train else 585)
    assert "## criteo: ten_epochs" in (tmp_path / "tables.md").read_text()
