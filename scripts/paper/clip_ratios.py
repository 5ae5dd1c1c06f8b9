"""Draws the histograms of gradient norm over limit of a run with `clip.histogram = true`, as the paper's figure 4 does.

python scripts/paper/clip_ratios.py runs/criteo -o clip_ratios.png
"""

import argparse
import json
import sys
from math import ceil
from pathlib import Path

from cowrec.trainer.reports.plotting import plt

COLUMNS = 4


def draw_ratios(run_dir: Path, output: Path) -> Path:
    """Draws a panel for each field, and the share of its rows that were clipped; returns the file.

    Raises:
        ValueError: the run has no histogram.
    """
    report = json.loads((run_dir / "report.json").read_text(encoding="utf-8"))
    if not report.get("clip_histogram"):
        raise ValueError(f"{run_dir} has no histogram; train it with clip.histogram = true and a clip rule")
    edges, fields = report["clip_histogram"]["edges"], report["clip_histogram"]["fields"]
    rows = ceil(len(fields) / COLUMNS)
    figure, axes = plt.subplots(rows, COLUMNS, figsize=(3 * COLUMNS, 2 * rows), sharex=True, squeeze=False)
    for axis in axes.flat[len(fields) :]:
        axis.set_visible(False)
    for axis, (name, counts) in zip(axes.flat, fields.items(), strict=False):
        total = sum(counts)
        axis.stairs([count / max(total, 1) for count in counts], edges, fill=True)
        axis.axvline(1, color="black", lw=0.8, ls="--")
        clipped = report["clip_statistics"]["fields"][name]["clipped"]
        axis.set_title(name if clipped is None else f"{name}: {100 * clipped:.2g} % clipped", fontsize=9)
        axis.set_xscale("log")
    figure.supxlabel("gradient norm / limit of a row")
    figure.supylabel("share of rows")
    figure.tight_layout()
    figure.savefig(output, dpi=120)
    plt.close(figure)
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, help="folder of a run")
    parser.add_argument("-o", "--output", type=Path, default=Path("clip_ratios.png"), help="file of the plot")
    arguments = parser.parse_args()
    try:
        print(draw_ratios(arguments.run_dir, arguments.output))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
