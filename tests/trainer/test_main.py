"""The command without the packages of the trainer, and with versions that do not match."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

import cowrec.sparse_opt.versions as versions
import cowrec.trainer.__main__ as command
from commands.command_line import exit_code

ROOT = Path(__file__).resolve().parents[2]


def test_the_packages_are_those_of_the_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert list(command.PACKAGES) == [re.split("[<>=]", each)[0] for each in extras["trainer"]]
    for extra in extras.keys() - {"trainer", "test", "docs", "dev"}:
        assert extras[extra][0] == "cowrec[trainer]"
        if extra in ("mlflow", "wandb"):  # too large for every test environment
            continue
        assert f"cowrec[{extra}" in extras["test"][0] or f",{extra}" in extras["test"][0]
    assert project["scripts"] == {"cowrec": "cowrec.trainer.__main__:main"}


def test_absent_packages_are_named_with_the_extra_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("typer", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    line = "the command line requires pyarrow, typer, not installed here: pip install 'cowrec[trainer]'"
    assert capsys.readouterr().err == f"cowrec: error: {line}\n"


def test_versions_that_do_not_match_are_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "MATCHED_SETS", (versions.MatchedSet("1.0.0", "1.0.0", "1.0.0"),))
    assert exit_code(monkeypatch, "evaluate", "run") == 2
    assert re.fullmatch(r"cowrec: error: cowrec needs torch, [^\n]+\n", capsys.readouterr().err)
