"""The plot of a clip's histograms."""

import json
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "paper" / "clip_ratios.py"


def drawn(run: Path, output: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(run), "-o", str(output)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_panel_for_each_field_even_without_rows(tmp_path: Path) -> None:
    fields = {f"C{number}": [number, 2, 0] for number in range(5)} | {"unused": [0, 0, 0]}
    statistics = {"fields": {name: {"clipped": 0.5 if any(counts) else None} for name, counts in fields.items()}}
    report = {"clip_histogram": {"edges": [0.01, 0.1, 1, 10], "fields": fields}, "clip_statistics": statistics}
    (tmp_path / "report.json").write_text(json.dumps(report))
    assert drawn(tmp_path, tmp_path / "plot.png").returncode == 0
    image = plt.imread(tmp_path / "plot.png")
    assert image.shape[1] > image.shape[0] > 300
    assert image.std() > 0
    (tmp_path / "report.json").write_text('{"clip_histogram": null}')
    refused = drawn(tmp_path, tmp_path / "other.png")
    assert refused.returncode == 1
    assert "has no histogram; train it with clip.histogram = true" in refused.stderr
