"""Calls in subprocesses: how they fail, and that a process takes several calls."""

import os
import time

import pytest
import torch

from cowrec.models import ModelConfig, require_model
from cowrec.trainer.runtime.errors import ProcessFailed
from cowrec.trainer.runtime.subprocess_call import Subprocess, run_in_subprocess


def look_up(key: str) -> int:
    return {"a": 1}[key]


def test_errors_and_ends_of_a_subprocess_are_errors() -> None:
    assert run_in_subprocess(look_up, "a") == 1
    with pytest.raises(ProcessFailed, match=r"^KeyError: 'b'$"):
        run_in_subprocess(look_up, "b")
    with pytest.raises(ProcessFailed, match=r"^ValueError: .*did you mean \"deepfm\""):
        run_in_subprocess(require_model, ModelConfig("deepfn"))
    with pytest.raises(ProcessFailed, match="ended by signal 6"):
        run_in_subprocess(os.abort)
    with pytest.raises(ProcessFailed, match="killed after 1 s"):
        run_in_subprocess(time.sleep, 60, timeout=1)


def test_with_a_gpu_subprocesses_are_not_forked_and_bugs_keep_their_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A process forked from the server would write where the server was started, perhaps in an earlier test."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ProcessFailed, match=r"^KeyError: 'b'$"):
        run_in_subprocess(look_up, "b")
    printed = capfd.readouterr().err
    assert "Traceback" in printed
    assert 'return {"a": 1}[key]' in printed
    with pytest.raises(ProcessFailed, match=r"^ValueError: .*did you mean \"deepfm\""):
        run_in_subprocess(require_model, ModelConfig("deepfn"))
    assert "Traceback" not in capfd.readouterr().err  # fbgemm 1.6 may print a warning


def test_a_process_takes_calls_until_one_fails() -> None:
    with Subprocess() as process:
        first = process.call(os.getpid)
        assert first not in (os.getpid(), process.call(os.getppid))
        assert process.call(os.getpid) == first
        with pytest.raises(ProcessFailed, match="KeyError"):
            process.call(look_up, "b")
        second = process.call(os.getpid)
        assert second != first
        with pytest.raises(ProcessFailed, match="ended by signal 6"):
            process.call(os.abort)
        third = process.call(os.getpid)
        assert third not in (first, second)
    with pytest.raises(ProcessLookupError):
        os.kill(third, 0)
