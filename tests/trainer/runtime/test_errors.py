"""Errors for users are one line, others are bugs and keep their traceback; logs as JSON are a line for everything."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from commands.command_line import Cowrec
from commands.forked_commands import run_forked
from cowrec.errors import UserError
from cowrec.files import write_file
from cowrec.sparse_opt.versions import UnmatchedVersions
from cowrec.trainer.config.run import config_from
from cowrec.trainer.runtime.errors import NonFiniteLoss, ProcessFailed, is_message, message_of
from cowrec.trainer.training import saved_run
from online_cases import case_fixture
from trainer_cases import ENVIRONMENT


def raised(call: Callable[[], Any]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_only_what_cowrec_raises_for_users_is_a_message() -> None:
    """And what the system says of files; not the errors of libraries, which are bugs."""
    assert is_message(raised(lambda: config_from({"train": {"batch_size": -2}})))
    assert is_message(raised(lambda: Path("/no/such/file").read_text()))
    assert all(is_message(kind("the loss was not finite")) for kind in (NonFiniteLoss, ProcessFailed))
    assert not is_message(raised(lambda: np.zeros(3).reshape(2, 2)))
    assert is_message(UserError("train.seed must be at least 0"))
    assert is_message(UnmatchedVersions("install torchrec"))
    assert is_message(raised(lambda: import_module("a_package_that_is_not_installed")))
    for call in (lambda: int("x"), lambda: json.loads("no json"), lambda: pa.scalar("x").cast(pa.int64())):
        assert not is_message(raised(call))
    for kind in (ValueError, ImportError, AssertionError, RuntimeError):
        assert not is_message(kind("a bug"))


def test_a_full_gpu_is_a_message() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 38.15 GiB. GPU 0 has a total capacity of ...")
    assert is_message(error)
    assert message_of(error).startswith("CUDA out of memory; lower train.batch_size or raise train.accumulation, ")


OF_INT = "ValueError: invalid literal for int() with base 10: 'x'"
BUGS = {"raise RuntimeError('a bug')": "RuntimeError: a bug", "int('x')": OF_INT}
FOR_USERS = [f"raise {kind}('the data set has no rows')" for kind in ("UserError", "OSError")]


@pytest.mark.parametrize("body", [*BUGS, *FOR_USERS])
def test_a_bug_keeps_its_traceback_and_an_error_for_users_is_one_line(
    cowrec: Cowrec, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    """Of a command in which ``body`` runs as cowrec's own code."""
    evaluation: dict[str, Any] = {"UserError": UserError}
    exec(f"def evaluate_run(*_, **__):\n    {body}", evaluation)
    monkeypatch.setattr(saved_run, "evaluate_run", evaluation["evaluate_run"])
    code, _, printed = cowrec("evaluate", "run", "--data", "data")
    if body in BUGS:
        assert (code, printed.splitlines()[-1]) == (1, BUGS[body])
        assert printed.startswith("Traceback (most recent call last):")
    else:
        assert (code, printed) == (2, "cowrec: error: the data set has no rows\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device /dev/full, which is always full")
def test_a_full_disk_is_named_with_the_remedy() -> None:
    error = raised(lambda: Path("/dev/full").write_bytes(b"x"))
    assert message_of(error).startswith("No space left on device; free disk space")
    error = raised(lambda: write_file(Path("/dev/full"), b"x"))
    assert message_of(error).startswith("No space left on device for /dev/full; free disk space")
    error = OSError(errno.EFBIG, os.strerror(errno.EFBIG), "x")
    assert message_of(error).startswith("File too large for x; raise the limit of file sizes (ulimit -f), then")
    assert message_of(OSError(errno.ENOSPC, "the disk of X is full")) == "[Errno 28] the disk of X is full"
    assert message_of(raised(lambda: Path("/no/such/file").read_text())).endswith("'/no/such/file'")


KEYS = {"time", "level", "logger", "message"}


case = case_fixture()


def command(case: Path, *arguments: str) -> list[str]:
    settings = ["--set", "online.window=4h", "--log-format", "json"]
    return ["online", f"{case}/run.toml", "--data", f"{case}/data", *settings, *arguments]


def records(text: str) -> list[dict[str, str]]:
    """The lines of a log, each of which must be an object with the keys of all."""
    found = [json.loads(line) for line in text.splitlines()]
    for entry in found:
        assert entry.keys() >= KEYS, entry
        assert datetime.fromisoformat(entry["time"]).tzinfo == UTC
        assert entry["level"] in ("info", "warning", "error", "critical")
    return found


def test_every_line_of_a_run_is_an_object(case: Path) -> None:
    done = run_forked(*command(case, "--source", f"{case}/incoming", "--run-dir", f"{case}/run"))
    assert done.returncode == 0, done.stderr
    found = records(done.stderr)
    assert any("progressive AUC" in record["message"] for record in found)
    assert found[-1]["logger"] == "cowrec.trainer.training.active_run"


def test_an_end_by_an_error_is_a_line_without_the_password(case: Path, tmp_path: Path) -> None:
    given = ["--source", "redis://me:hush-hush@127.0.0.1:1/0", "--run-dir", str(tmp_path / "run")]
    done = run_forked(*command(case, *given))
    assert done.returncode == 2
    message = "redis://***@127.0.0.1:1/0: must name a stream; add ?stream=NAME"
    *_, last = records(done.stderr)
    assert (last["level"], last["message"]) == ("critical", message)
    assert "hush" not in done.stderr


PROGRAM = """
import logging, threading, warnings
from cowrec.trainer.runtime.environment import show_log
logger = logging.getLogger("cowrec.trainer.any")
show_log("json")
logger.warning("cannot reach %s nor %s", "kafka://h:1/t?sasl.password=hush", "redis://u:hush@h/0")
logging.getLogger("a.library").error("of a library")
warnings.warn("of Python")
try:
    raise KeyError("redis://:hush@h/0")
except KeyError:
    logger.exception("a bug")
thread = threading.Thread(target=lambda: 1 / 0, name="worker")
thread.start()
thread.join()
logger.info("odd characters \\ud800 and\\na line end")
"""


def test_libraries_threads_and_bugs_are_lines_too() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    addresses, library, python, bug, thread, odd = records(done.stderr)
    assert addresses["message"] == "cannot reach kafka://h:1/t?sasl.password=*** nor redis://***@h/0"
    assert (library["logger"], library["message"]) == ("a.library", "of a library")
    assert "of Python" in python["message"]
    assert bug["exception"].endswith("KeyError: 'redis://***@h/0'")
    assert (thread["level"], thread["message"]) == ("error", "worker failed")
    assert "ZeroDivisionError" in thread["exception"]
    assert odd["message"] == "odd characters \ud800 and\na line end"
    assert "hush" not in done.stderr
