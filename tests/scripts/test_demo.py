"""`cowrec demo` on few samples, and the example of CowClip in a TorchRec job in one process and two."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cowrec.data_pipeline import SynthesizeConfig
from cowrec.trainer.cli.demo import demo
from cowrec.trainer.config.run import RunConfig, load_config
from cowrec.trainer.config.sections import OptimizerConfig
from cowrec.trainer.reports.plotting import plt

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def alike(config: RunConfig) -> RunConfig:
    """The configuration without batch size and scaling rule."""
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, batch_size=1),
        optimizer=dataclasses.replace(config.optimizer, scaling="none"),
    )


def test_runs_summary_table_and_plot(tmp_path: Path) -> None:
    (tmp_path / ".demo").touch()
    (tmp_path / "small_batch").mkdir()
    (tmp_path / "small_batch" / "earlier").touch()
    rows = 2 * 4096 + 1
    printed = demo(tmp_path, SynthesizeConfig(rows=rows, test_rows=2000, vocabulary_scale=1e-5))
    assert not (tmp_path / "small_batch" / "earlier").exists()
    summary = json.loads((tmp_path / "summary.json").read_text())
    runs = [tmp_path / run["name"].replace(" ", "_") for run in summary]
    reports = [json.loads((run / "report.json").read_text()) for run in runs]
    for line, report in zip(summary, reports, strict=True):
        assert [line[key] for key in ("auc", "logloss", "steps", "seconds")] == [
            report[key] for key in ("auc", "logloss", "steps", "train_seconds")
        ]
    small, *large = summary
    assert (small["batch_size"], small["steps"]) == (64, 2 * 129)
    assert {(run["batch_size"], run["steps"]) for run in large} == {(4096, 2 * 3)}
    assert [run["default"] for run in summary] == [False, True, *[False] * (len(summary) - 2)]
    assert [run["scaling"] for run in large][:2] == [OptimizerConfig().scaling, "none"]
    configs = [alike(load_config(run / "config.toml")) for run in runs]
    assert configs == [configs[0]] * len(configs)
    assert configs[0].optimizer.base_batch_size == small["batch_size"]

    head, *lines = printed.strip().split("\n\n")[0].splitlines()
    assert head.split()[:4] == ["run", "batch", "rule", "steps"]
    for line, shown in zip(large, lines[1:], strict=True):
        assert [f"{line['auc'] - small['auc']:+.4f}", f"{line['logloss']:.4f}"] == shown.split()[-2:]
        assert f"  {line['scaling']}  " in shown
    assert min(plt.imread(tmp_path / "demo.png").shape[:2]) > 400


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "data" / "clicks" / "mine.parquet"
    mine.parent.mkdir(parents=True)
    mine.touch()
    for program in (["-m", "cowrec.trainer", "demo"], [SCRIPTS / "online_demo.py"]):
        ended = subprocess.run(
            [sys.executable, *program, "--output", tmp_path], capture_output=True, text=True, check=False
        )
        assert ended.returncode == 2
        assert f"{tmp_path} is not empty" in ended.stderr
        assert list(tmp_path.rglob("*")) == [tmp_path / "data", mine.parent, mine]


SCRIPT = str(SCRIPTS / "torchrec_dlrm_example.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# Use the loopback interface regardless of the host name; one thread per process suffices.
ENVIRONMENT = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("launcher", "options", "processes"), [([], [], 1), ([], ["--replay"], 1), (TORCHRUN, ["--replay"], 2)]
)
def test_learns_and_reports_the_clip(launcher: list[str], options: list[str], processes: int) -> None:
    """Runs both optimizers; 512 samples per step in total, each with 1 to 3 ids per field."""
    steps = ["--steps", "100", "--batch-size", str(512 // processes)]
    command = [sys.executable, *launcher, SCRIPT, *steps, *options]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        try:
            output, errors = run.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            run.terminate()  # torchrun then ends its ranks; if killed it would not
            raise
    assert run.returncode == 0, errors
    losses = {
        int(step): float(loss) for step, loss in re.findall(r"^step +(\d+) +loss ([\d.]+)$", output, re.MULTILINE)
    }
    assert losses[100] < 0.9 * losses[1]
    statistics = re.findall(r"^(field\d)  (\d+) rows updated, ([\d.]+)% of them clipped", output, re.MULTILINE)
    assert [table for table, _, _ in statistics] == [f"field{i}" for i in range(8)]
    for _, rows, clipped in statistics:
        assert 100 * 512 < int(rows) < 100 * 512 * 3
        assert 0 <= float(clipped) <= 100
