"""cowrec.trainer from Python: quiet, repeatable, from any thread, and without traces in the process."""

import os
import signal
import subprocess
import sys
import threading
import warnings
from importlib.metadata import version
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch.distributed as dist

import cowrec.trainer
from commands.command_line import exit_code
from process_groups import in_processes
from trainer_cases import TEST_ROWS, config_file, make_data

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def state() -> tuple:
    """What a call must leave as it was."""
    handlers = [signal.getsignal(each) for each in SIGNALS]
    return dict(os.environ), handlers, list(warnings.filters), dist.is_initialized(), threading.active_count()


def test_the_package_loads_nothing_until_a_name_is_used() -> None:
    loaded = "[name in sys.modules for name in ('torch', 'pyarrow', 'typer')]"
    program = f"import sys, cowrec.trainer as trainer; print({loaded}, trainer.__version__)"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert printed.stdout == f"[False, False, False] {version('cowrec')}\n"
    assert printed.stderr == ""
    with pytest.raises(AttributeError, match="has no attribute 'trains'"):
        _ = cowrec.trainer.trains


def test_runs_leave_no_traces_and_print_nothing(tmp_path: Path) -> None:
    """Two runs in one process, one of them in a thread as notebooks and servers have them; paths are strings."""
    make_data(tmp_path)
    in_processes(_two_runs, (str(tmp_path), str(config_file(tmp_path))), 1)
    assert (tmp_path / "printed").read_text() == ""


def _two_runs(_: int, folder: str, config_path: str) -> None:
    from cowrec.trainer import evaluate, load_config, predict, train

    printed = os.open(f"{folder}/printed", os.O_CREAT | os.O_WRONLY)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    data = f"{folder}/data"
    config = load_config(config_path, ["train.epochs=1"])
    before = state()
    reports = [train(config, data, f"{folder}/first")]
    assert state() == before
    thread = threading.Thread(target=lambda: reports.append(train(config, data, f"{folder}/second")))
    thread.start()
    thread.join()
    assert reports[0]["logloss"] == reports[1]["logloss"]
    assert evaluate(f"{folder}/first", data)["logloss"] == pytest.approx(reports[0]["logloss"], abs=1e-7)
    assert predict(f"{folder}/first", data, f"{folder}/p.parquet") == TEST_ROWS
    assert pq.read_table(f"{folder}/p.parquet").num_rows == TEST_ROWS
    with pytest.raises(ValueError, match="has a complete run"):
        train(config, data, f"{folder}/first")
    assert state() == before

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(ValueError, match=r"has a process group already.*destroy_process_group"):
        train(config, data, f"{folder}/third")
    assert dist.is_initialized()
    os._exit(0)  # see process_groups


def test_the_command_prints_versions(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith(f"cowrec {version('cowrec')}  torch ")
