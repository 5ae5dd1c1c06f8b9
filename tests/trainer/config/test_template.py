"""`cowrec config init`: what it writes loads, and has the values of the shipped configuration."""

import re
from pathlib import Path

import pytest

from commands.command_line import Cowrec
from cowrec.trainer.config.reference import OWN_DATA, presets, run_file
from cowrec.trainer.config.run import RunConfig, load_config

CONFIGS = Path(__file__).resolve().parents[3] / "trainer" / "configs"
KEY = re.compile(r"^# (\w+ = .+)$", re.MULTILINE)


def test_every_shipped_configuration_can_be_had() -> None:
    files = [file.relative_to(CONFIGS).with_suffix("").as_posix() for file in CONFIGS.rglob("*.toml")]
    shipped = {name for name in files if not name.endswith("_schema")}
    assert set(presets()) == shipped | {OWN_DATA}


@pytest.mark.parametrize("preset", presets())
def test_a_written_file_has_the_values_of_its_preset(preset: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(run_file(preset))
    expected = RunConfig() if preset == OWN_DATA else load_config(CONFIGS / f"{preset}.toml")
    assert load_config(tmp_path / "run.toml") == expected


def test_keys_can_be_uncommented(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(KEY.sub(r"\1", run_file()))
    assert load_config(tmp_path / "run.toml") == RunConfig()
    assert len(KEY.findall(run_file())) > 80


def test_the_command_writes_new_files_only(cowrec: Cowrec, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    assert cowrec("config", "init", "--for", "avazu", "--output", file)[0] == 0
    assert file.read_text() == run_file("avazu")
    assert f"{file} exists; choose another --output" in cowrec("config", "init", "--output", file)[2]
    assert cowrec("config", "init") == (0, run_file(), "")
    assert "--for 'critoe' is not known; did you mean 'criteo'?" in cowrec("config", "init", "--for", "critoe")[2]
