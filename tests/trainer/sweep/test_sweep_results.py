"""Table and plot of a sweep's lines, against numpy's means and deviations."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgba

from cowrec.sparse_opt import SCALING_RULES
from cowrec.trainer.reports.plotting import plt
from cowrec.trainer.sweep.results import plot_sweep, sweep_table
from cowrec.trainer.sweep.sweep import _in_short

SHARED = {"model": "deepfm", "data": "clicks", "device": "a CPU", "best_possible": {"auc": 0.9, "logloss": 0.3}}
BASE = [0.80, 0.81, 0.82]
STEPS = {64: 31_250, 8192: 244, 16384: 122}


def lines_of(aucs: dict[tuple[str, int], Sequence[float]], clip: str = "on", **more: Any) -> list[dict[str, Any]]:
    return [
        {
            **SHARED,
            **{"rule": rule, "batch_size": size, "clip": clip, "seed": seed, "base_batch_size": 64},
            **{"auc": auc, "best_epoch_auc": auc, "logloss": 1 - auc, "steps": STEPS.get(size), **more},
        }
        for (rule, size), values in aucs.items()
        for seed, auc in enumerate(values)
    ]


def row(text: str, block: str, name: str) -> list[str]:
    """Cells of a row of the table whose first cell starts with `block`."""
    (found,) = [each for each in text.split("\n\n") if re.match(rf"{re.escape(block)}( \(%\))?  ", each)]
    (cells,) = [line.split("  ") for line in found.splitlines() if line.startswith(name)]
    return [cell.strip() for cell in cells if cell.strip()][1:]


def drawn(monkeypatch: pytest.MonkeyPatch, lines: list[dict[str, Any]], path: Path) -> Any:
    """The figure that a plot saves."""
    with monkeypatch.context() as patched:
        patched.setattr(plt, "close", lambda figure: None)
        image = plt.imread(plot_sweep(lines, path))
        assert min(image.shape[:2]) > 400
        assert image.std() > 0
        figure = plt.gcf()
    plt.close(figure)
    return figure


def test_values_are_mean_and_standard_deviation_over_seeds() -> None:
    on = lines_of({("cowclip", 8192): [0.81, 0.82, 0.84], ("cowclip", 100): [0.8, 0.8, 0.8]})
    lines = on + lines_of({("cowclip", 8192): [0.7]}, clip="off")
    text = sweep_table(lines)
    assert text.splitlines()[0].split() == ["test", "AUC", "(%)", "100", "8K"]
    mean, spread = 100 * np.mean([0.81, 0.82, 0.84]), 100 * np.std([0.81, 0.82, 0.84], ddof=1)
    assert row(text, "test AUC", "cowclip, clip on") == ["80.00 ± 0.00", f"{mean:.2f} ± {spread:.2f}"]
    assert row(text, "test AUC", "cowclip, clip off") == ["failed", "70.00 (1 of 3)"]
    assert text.endswith("The base, batch 64, is not in this sweep; add it to see what a batch loses.")


def test_differences_from_the_base_and_its_spread() -> None:
    """The base's deviation is one point: 81.5 is within it, 79.9 and 82.1 are outside."""
    aucs = {("cowclip", 64): BASE, ("cowclip", 8192): [0.799] * 3, ("cowclip", 16384): [0.821] * 3}
    aucs |= {("linear", 64): BASE[:2], ("linear", 8192): [0.815] * 3, ("linear", 16384): [0.5, 0.6, 0.7]}
    text = sweep_table(lines_of(aucs))
    base = "81.00 ± 1.00"
    assert row(text, "test AUC", "cowclip") == [base, "79.90 ± 0.00, -1.10 lost", "82.10 ± 0.00, +1.10 better"]
    of_linear = ["80.50 ± 0.71 (2 of 3)", "81.50 ± 0.00, +0.50 within", "60.00 ± 10.00, -21.00 lost"]
    assert row(text, "test AUC", "linear") == of_linear
    logloss = ["0.1900 ± 0.0100", "0.2010 ± 0.0000, +0.0110 lost", "0.1790 ± 0.0000, -0.0110 better"]
    assert row(text, "test logloss", "cowclip") == logloss
    assert row(text, "test AUC", "steps") == ["31,250", "244", "122"]
    assert "warning: batch 16K has 122 steps, below 200: too few steps to judge a rule" in text
    assert "batch 8K has" not in text
    assert "At the base, batch 64, all rules are one run, trained once for each seed." in text
    assert "best epoch" not in text


def test_each_clip_is_compared_with_its_own_base_and_one_seed_has_no_spread() -> None:
    lines = lines_of({("none", 64): [0.8], ("none", 8192): [0.7]})
    lines += lines_of({("none", 64): [0.6], ("none", 8192): [0.65]}, clip="off")
    lines.append({**lines[0], "rule": "linear", "batch_size": 8192, "auc": None})
    text = sweep_table(lines)
    assert row(text, "test AUC", "none, clip on") == ["80.00", "70.00, -10.00"]
    assert row(text, "test AUC", "none, clip off") == ["60.00", "65.00, +5.00"]
    assert row(text, "test AUC", "linear, clip on") == ["failed", "failed"]
    assert "its spread is unknown; give --seeds 3 or more" in text
    failed = [{key: line[key] for key in line if key != "auc"} for line in lines]
    assert "No run of the base, batch 64, has an AUC" in sweep_table(failed)


def test_best_epoch_and_expected_logloss_are_shown_where_lines_have_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    aucs = {("cowclip", 64): BASE, ("cowclip", 8192): BASE}
    lines = lines_of(aucs, expected_logloss=0.44)
    lines[0]["best_epoch_auc"] = lines[0]["auc"] + 0.0009
    assert "best epoch" not in sweep_table(lines)
    lines[-1]["best_epoch_auc"] = 0.85
    text = sweep_table(lines)
    expected = 100 * (np.mean([*BASE[:2], 0.85]) - np.mean([BASE[0] + 0.0009, *BASE[1:]]))
    assert row(text, "test AUC of the best epoch", "cowclip")[1].endswith(f", {expected:+.2f} better")
    assert row(text, "expected logloss", "cowclip")[1].endswith(", +0.0000 within")
    panels = [axis.get_ylabel() for axis in drawn(monkeypatch, lines, tmp_path / "sweep.png").axes]
    assert panels == ["test AUC", "test AUC of the best epoch", "test logloss", "expected logloss"]


def test_the_plot_has_the_band_of_the_base_and_a_style_for_every_rule(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    aucs = {(rule, 64): BASE for rule in SCALING_RULES} | {(rule, 8192): [0.7, 0.71, 0.72] for rule in SCALING_RULES}
    lines = lines_of(aucs) + lines_of(aucs, clip="off")
    figure = drawn(monkeypatch, lines, tmp_path / "sweep.png")
    quality = figure.axes[0]
    mean, spread = np.mean(BASE), np.std(BASE, ddof=1)
    bands = [patch.get_extents().transformed(quality.transData.inverted()) for patch in quality.patches]
    assert [(band.y0, band.y1) for band in bands] == [pytest.approx((mean - spread, mean + spread))] * 2
    assert [text.get_text() for text in quality.get_xticklabels()] == ["64\n31,250 steps", "8K\n244 steps"]
    entries = {text.get_text() for text in figure.legends[0].get_texts()}
    curves = {container.get_label(): container.lines[0] for container in quality.containers}
    both = [f"{rule}, clip {clip}" for clip in ("on", "off") for rule in SCALING_RULES]
    assert list(curves) == both
    assert entries == {*both, "base, batch 64, clip on", "base, batch 64, clip off", "best possible"}
    styles = {(to_rgba(curves[name].get_color()), curves[name].get_marker()) for name in both}
    assert len(styles) == len({color for color, _ in styles}) == len(SCALING_RULES)
    assert {curve.get_xdata()[0] for curve in curves.values()} == {64}
    assert len({curve.get_xdata()[1] for curve in curves.values()}) == len(both), "curves are shifted sideways"


@pytest.mark.parametrize(("size", "steps", "warns"), [(8192, 199, True), (8192, 200, False), (64, 9, False)])
def test_a_run_with_few_steps_warns_in_the_terminal(size: int, steps: int, warns: bool) -> None:
    line = lines_of({("none", size): [0.8]}, steps=steps, samples_per_second=1.0)[0]
    assert ("too few steps to judge a rule" in _in_short(line)) == warns
