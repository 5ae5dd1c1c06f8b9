"""The remedies that messages give are commands and settings that work."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commands.command_line import Cowrec
from cowrec.trainer.measures.quality import auc_remark
from trainer_cases import CONFIG, TRAIN_ROWS, raw_rows

COLUMNS = ("price", "city")
SCHEMA = 'label = "click"\nfields = [{name = "price", kind = "numeric"}, {name = "city", kind = "categorical"}]\n'
TRAIN, VALIDATED = (f"train run.toml --data {data} --run-dir" for data in ("data", "validated"))
PATIENT = "--set train.patience=1 --set checkpoint.keep_best=logloss"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw files and run files; the first test prepares and trains."""
    folder = tmp_path_factory.mktemp("case")
    (folder / "raw.csv").write_text(raw_rows(TRAIN_ROWS, COLUMNS))
    (folder / "new.csv").write_text(raw_rows(20, COLUMNS, seed=1, labelled=False))
    (folder / "bad.csv").write_text(raw_rows(20, COLUMNS, seed=1, labelled=False) + "much,city1\n")
    (folder / "columns.toml").write_text(SCHEMA)
    (folder / "run.toml").write_text(CONFIG)
    return folder


PREPARE = "prepare tabular --schema columns.toml --input raw.csv"
SETUP = (
    f"{PREPARE} --output data",
    f"{PREPARE} --output validated --set prepare.validation_fraction=0.1",
    f"{PREPARE} --output other --set prepare.seed=1",
    f"{TRAIN} run",
    f"{TRAIN} stopped",
)


def settings(text: str) -> str:
    """The flags for `key = value, key = value and key = value`, and for `key to value`, in a text."""
    found = re.findall(r"(\w+\.\w+)(?: = | to )(\"?[\w.]+\"?)", text)
    return " ".join(f"--set {key}={value}" for key, value in found)


ADVICE: dict[str, tuple[str, str | Callable[[re.Match[str]], str]]] = {
    # What leads to a message: how the message gives its remedy, and the command that follows it.
    f"{TRAIN} a --set train.batch_size=100": (
        r"; set (train.batch_size to \d+), or (train.epochs to .*), since",
        lambda found: f"{TRAIN} b --set train.batch_size=100 {settings(found[2])}",
    ),
    f"{VALIDATED} c --set train.batch_size=99": (
        r"; set (train.batch_size to \d+), or (train.epochs to .*), since",
        lambda found: f"{VALIDATED} d --set train.batch_size=99 {settings(found[2])}",
    ),
    f"{VALIDATED} g --set train.patience=1": (
        r'set (checkpoint.keep_best to "logloss") or',
        lambda found: f"{VALIDATED} g --set train.patience=1 {settings(found[1])}",
    ),
    f"{TRAIN} h {PATIENT}": (
        r"set (train.validation_fraction), for example to ([\d.]+)",
        rf"{TRAIN} h {PATIENT} --set \1=\2",
    ),
    f"{VALIDATED} i --set train.validation_fraction=0.1": (
        r"which is used; set (train.validation_fraction = 0)",
        lambda found: f"{VALIDATED} i {settings(found[1])}",
    ),
    f"{TRAIN} stopped": (r"which cowrec (train .* --resume) continues", r"\1"),
    "train none.toml --data data": (r"cowrec (config init --output none.toml) writes one", r"\1"),
    "train run.toml --data raw.csv": (r"cowrec (fit raw.csv) trains on them", r"\1 --label click --config run.toml"),
    "predict run --data new.csv --output p.parquet": (
        r"predict and evaluate take them with (--input new.csv)",
        r"predict run \1 --output p.parquet",
    ),
    "predict run --data other --output p.parquet": (
        r"prepare its raw files with (--like run), or",
        r"prepare tabular \1 --input raw.csv --output like",
    ),
    "predict run --input bad.csv --output p.parquet": (
        r"\((--set prepare.on_bad_row=skip)\)",
        r"predict run --input bad.csv --output p.parquet \1",
    ),
    f"{PREPARE} --output data": (r"\(prepare: (--overwrite)\)", rf"{PREPARE} --output data \1"),
    f"{PREPARE} --output m --min-count=2": (r"write (--set prepare.min_count=2)", rf"{PREPARE} --output m \1"),
}


@pytest.mark.parametrize("command", ADVICE)
def test_advice_works(cowrec: Cowrec, folder: Path, monkeypatch: Any, command: str) -> None:
    monkeypatch.chdir(folder)
    if not (folder / "data").exists():
        for line in SETUP:
            assert cowrec(*line.split())[0] == 0, line
        (folder / "stopped" / "report.json").unlink()
    said = cowrec(*command.split())[2]
    pattern, remedy = ADVICE[command]
    found = re.search(pattern, said)
    assert found, said
    code, _, problem = cowrec(*(remedy(found) if callable(remedy) else found.expand(remedy)).split())
    assert code == 0, problem


def test_advice_to_stop_early_is_that_of_the_run() -> None:
    """Validation samples are held out where there are none."""
    fell = [{"epoch": 1, "auc": 0.8, "validation_auc": 0.8}, {"epoch": 2, "auc": 0.7, "validation_auc": 0.7}]
    early = 'train.patience = 1, checkpoint.keep_best = "auc"'
    assert str(auc_remark(fell[1], fell)).endswith(f"or stop early: {early}")
    alone = [{key: value for key, value in epoch.items() if key != "validation_auc"} for epoch in fell]
    assert str(auc_remark(alone[1], alone)).endswith(f"or stop early: train.validation_fraction = 0.1, {early}")
