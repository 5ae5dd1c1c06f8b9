"""The command ``cowrec plot``."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def plot(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, finished or not.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="PNG, SVG or PDF file to write.")] = Path("runs.png"),
) -> None:
    """Draws the curves of one or several runs in one figure, and prints a table of their quality.

    The figure has training loss, AUC, logloss, learning rates, samples per second, and calibration: click rate over
    mean prediction of each twentieth of the test samples, after the last epoch.

    Example: `cowrec plot runs/base runs/large --output comparison.png`
    """
    from cowrec.trainer.reports.run_curves import RunCurves, curves_table
    from cowrec.trainer.reports.run_plot import FORMATS, plot_runs
    from cowrec.trainer.runs.run_dir import METRICS

    if output.suffix.lstrip(".") not in FORMATS:
        raise ValueError(f"{output} must end in one of: {', '.join('.' + each for each in FORMATS)}")
    names = [run.name for run in runs]
    curves = [RunCurves.read(run.name if names.count(run.name) == 1 else str(run), run / METRICS) for run in runs]
    print(f"{curves_table(curves)}\n\nplot: {plot_runs(curves, output)}")
