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
from command_line import exit_code
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


def test_runs_leave_no_traces_and_print_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two runs in one process, one of them in a thread as notebooks and servers have them; paths are strings."""
    from cowrec.trainer import evaluate, load_config, predict, train

    data = str(make_data(tmp_path))
    config = load_config(str(config_file(tmp_path)), ["train.epochs=1"])
    before = state()
    reports = [train(config, data, str(tmp_path / "first"))]
    assert state() == before
    thread = threading.Thread(target=lambda: reports.append(train(config, data, str(tmp_path / "second"))))
    thread.start()
    thread.join()
    assert reports[0]["logloss"] == reports[1]["logloss"]
    assert evaluate(str(tmp_path / "first"), data)["logloss"] == pytest.approx(reports[0]["logloss"], abs=1e-7)
    assert predict(str(tmp_path / "first"), data, str(tmp_path / "p.parquet")) == TEST_ROWS
    assert pq.read_table(tmp_path / "p.parquet").num_rows == TEST_ROWS
    with pytest.raises(ValueError, match="has a complete run"):
        train(config, data, str(tmp_path / "first"))
    assert state() == before
    assert capfd.readouterr() == ("", "")

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"has a process group already.*destroy_process_group"):
            train(config, data, tmp_path / "third")
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_the_command_prints_versions(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith(f"cowrec {version('cowrec')}  torch ")
