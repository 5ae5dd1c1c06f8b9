"""What `cowrec online` and `cowrec serve` log as JSON: a line for everything, without credentials."""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from commands.forked_commands import run_forked
from online_cases import case_fixture
from trainer_cases import ENVIRONMENT

KEYS = {"time", "level", "logger", "message"}


case = case_fixture()


def command(case: Path, *arguments: str) -> list[str]:
    settings = ["--set", "online.window=4h", "--log-format", "json"]
    return ["online", f"{case}/run.toml", "--data", f"{case}/data", *settings, *arguments]


def records(text: str) -> list[dict[str, str]]:
    """The lines of a log, each of which must be an object with the keys of all."""
    found = [json.loads(line) for line in text.splitlines()]
    for each in found:
        assert each.keys() >= KEYS, each
        assert datetime.fromisoformat(each["time"]).tzinfo == UTC
        assert each["level"] in ("info", "warning", "error", "critical")
    return found


def test_every_line_of_a_run_is_an_object(case: Path) -> None:
    done = run_forked(*command(case, "--source", f"{case}/incoming", "--run-dir", f"{case}/run"))
    assert done.returncode == 0, done.stderr
    found = records(done.stderr)
    assert any("progressive AUC" in record["message"] for record in found)
    assert found[-1]["logger"] == "cowrec.trainer.training.loop"


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
