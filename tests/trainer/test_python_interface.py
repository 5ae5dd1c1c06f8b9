"""cowrec.trainer from Python, without traces in the process, and the command where packages are absent."""

import os
import re
import signal
import sys
import threading
import tomllib
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch.distributed as dist

import cowrec.sparse_opt.versions as versions
import cowrec.trainer.__main__ as command
from commands.command_line import Cowrec
from process_groups import in_processes
from refusal import refused
from run_comparison import wait_for
from trainer_cases import TEST_ROWS, config_file, make_data

ROOT = Path(__file__).resolve().parents[2]
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def state() -> tuple:
    """What a call must leave as it was."""
    handlers = [signal.getsignal(number) for number in SIGNALS]
    return dict(os.environ), handlers, list(warnings.filters), dist.is_initialized(), threading.active_count()


def test_runs_leave_no_traces_and_print_warnings_alone(tmp_path: Path) -> None:
    """Two runs in one process, one of them in a thread as notebooks and servers have them; paths are strings."""
    make_data(tmp_path)
    in_processes(_two_runs, (str(tmp_path), str(config_file(tmp_path))), 1)
    printed = (tmp_path / "printed").read_text().splitlines()
    expected = re.compile("warning: the run has 5 steps|compiling kernels for this machine's CPU")
    assert all(map(expected.search, printed)), "torch's logging shows warnings"


def _two_runs(_: int, folder: str, config_path: str) -> None:
    from cowrec.trainer import evaluate, load_config, predict, train

    printed = os.open(f"{folder}/printed", os.O_CREAT | os.O_WRONLY)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    data = f"{folder}/data"
    config = load_config(config_path, ["train.epochs=1"])
    before = state()
    reports = [train(config, data, f"{folder}/first")]
    wait_for(lambda: state() == before)  # a thread that has written a checkpoint may be about to end
    thread = threading.Thread(target=lambda: reports.append(train(config, data, f"{folder}/second")))
    thread.start()
    thread.join()
    assert reports[0]["logloss"] == reports[1]["logloss"]
    assert evaluate(f"{folder}/first", data)["logloss"] == pytest.approx(reports[0]["logloss"], abs=1e-7)
    assert predict(f"{folder}/first", data, f"{folder}/p.parquet") == TEST_ROWS
    assert pq.read_table(f"{folder}/p.parquet").num_rows == TEST_ROWS
    refused("has a complete run", train, config, data, f"{folder}/first")
    assert state() == before

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    refused(r"has a process group already.*destroy_process_group", train, config, data, f"{folder}/third")
    assert dist.is_initialized()
    os._exit(0)  # see process_groups


def test_the_packages_are_those_of_the_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert list(command.PACKAGES) == [re.split("[<>=]", package)[0] for package in extras["trainer"]]
    for extra in extras.keys() - {"trainer", "test", "docs", "dev"}:
        assert extras[extra][0] == "cowrec[trainer]"
        if extra in ("mlflow", "wandb"):  # too large for every test environment
            continue
        assert f"cowrec[{extra}" in extras["test"][0] or f",{extra}" in extras["test"][0]
    assert project["scripts"] == {"cowrec": "cowrec.trainer.__main__:main"}


def test_absent_packages_are_named_with_the_extra_in_one_line(monkeypatch: Any, capsys: Any) -> None:
    for name in ("typer", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    line = "the command line requires pyarrow, typer, not installed here: pip install 'cowrec[trainer]'"
    assert capsys.readouterr().err == f"cowrec: error: {line}\n"


def test_versions_are_printed_and_named_in_one_line_if_they_do_not_match(cowrec: Cowrec, monkeypatch: Any) -> None:
    code, printed, _ = cowrec("--version")
    assert (code, printed.startswith(f"cowrec {version('cowrec')}  torch ")) == (0, True)
    monkeypatch.setattr(versions, "MATCHED_SETS", (versions.MatchedSet("2.99.0", "1.94.0", "1.94.0", "3.11"),))
    code, _, error = cowrec("evaluate", "run")
    assert code == 2
    assert re.fullmatch(r"cowrec: error: cowrec needs torch, [^\n]+\n", error)
