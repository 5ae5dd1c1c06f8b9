"""The command line ``cowrec``, in the process of the test."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cowrec.trainer.cli.main import main
from cowrec.trainer.runtime.environment import hide_log

Cowrec = Callable[..., tuple[int, str, str]]
"""The fixture ``cowrec``: runs ``cowrec ARGUMENTS``; returns its exit code, its output and its errors."""


def exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """Exit code of ``cowrec ARGUMENTS``."""
    monkeypatch.setattr(sys, "argv", ["cowrec", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    hide_log()
    code = ended.value.code
    return code if isinstance(code, int) else 0
