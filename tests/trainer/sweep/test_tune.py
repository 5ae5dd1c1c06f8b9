"""A study against single runs and what Optuna reads from its file; killed, failed and refused studies."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from commands.command_line import Cowrec
from commands.forked_commands import Forked
from cowrec.trainer import load_config, train
from cowrec.trainer.sweep.runs import Runs
from cowrec.trainer.sweep.tune import Outcome, Search, hints, study_of, tune
from trained_runs import data_folder

TRIALS = 6
OVERRIDES = ["train.epochs=3", "optimizer.warmup_epochs=0", "data.resident=yes"]
SEARCH = Search(102, ranges={"embedding_lr": None, "dense_lr": (1e-4, 1.0)}, validation_fraction=0.2)
VALUES = ("embedding_lr", "dense_lr", "l2")


folder = data_folder("price", "city")


@pytest.fixture(scope="module")
def found(folder: Path) -> Outcome:
    return run(folder, folder / "study")


def run(folder: Path, output: Path, *overrides: str, search: Search = SEARCH, trials: int = TRIALS) -> Outcome:
    config = load_config(folder / "run.toml", [*OVERRIDES, *overrides])
    return tune(config, folder / "data", output, search, trials)


def command(folder: Path, output: Path) -> list[str]:
    """Arguments of ``cowrec`` for the search."""
    given = f"tune {folder}/run.toml --data {folder}/data --output {output} --batch-size 102 --trials {TRIALS}"
    given += " --validation-fraction 0.2 --embedding-lr fixed --dense-lr 1e-4,1"
    return [*given.split(), *(part for override in OVERRIDES for part in ("--set", override))]


def lines_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "tune.jsonl").read_text().splitlines()]


def test_optuna_learns_from_the_values_and_qualities_of_the_lines(folder: Path, found: Outcome) -> None:
    """The first trial is the configuration by CowClip's rule at twice the base batch: dense rate * sqrt 2, L2 * 2."""
    lines = lines_of(folder / "study")
    study = study_of(SEARCH, found.ranges, lines)
    assert lines == found.lines
    assert len(lines) == TRIALS
    states = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned"}
    for trial, line in zip(study.trials, lines, strict=True):
        assert states[trial.state] == line["state"]
        assert trial.params == {name: line[name] for name in ("dense_lr", "l2")}
        losses = {epoch["epoch"]: epoch["validation_logloss"] for epoch in line["epochs"]}
        assert trial.intermediate_values == losses
        assert line["validation_logloss"] == min(losses.values())
        assert line["best_epoch"] == min(losses, key=lambda epoch: losses[epoch])
        assert 1e-4 <= line["dense_lr"] <= 1
        assert line["embedding_lr"] == 1e-2
        assert {"seconds", "versions", "device", "git_commit", "steps", "config_sha256"} <= line.keys()
        assert not {"auc", "logloss"} & line.keys(), "the test split is looked at"
    assert found.best == lines[study.best_trial.number]
    assert len({line["dense_lr"] for line in lines}) == TRIALS
    first = {name: lines[0][name] for name in VALUES}
    assert first == pytest.approx({"embedding_lr": 1e-2, "dense_lr": 1e-2 * 2**0.5, "l2": 2e-4})
    assert found.ranges["l2"] == pytest.approx((2e-5, 2e-3))


def test_tuned_toml_trains_what_the_best_trial_did(folder: Path, found: Outcome, tmp_path: Path) -> None:
    file = folder / "study" / "tuned.toml"
    tuned, best = load_config(file), found.best
    assert best is not None
    comment = f"# found by cowrec tune at batch size 102: trial {best['trial'] + 1} of {TRIALS}\n"
    assert file.read_text().startswith(comment)
    assert {name: getattr(tuned.optimizer, name) for name in VALUES} == {name: best[name] for name in VALUES}
    assert (tuned.optimizer.base_batch_size, tuned.train.batch_size) == (102, 102)
    assert (tuned.train.epochs, tuned.train.validation_fraction) == (best["best_epoch"], 0.0)
    alone = load_config(file, ["train.validation_fraction=0.2"])
    assert train(alone, folder / "data", tmp_path / "alone")["validation_logloss"] == best["validation_logloss"]


def test_a_killed_study_goes_on_as_if_it_had_not_been(folder: Path, found: Outcome, tmp_path: Path) -> None:
    output = tmp_path / "out"
    process = Forked(*command(folder, output))
    trial = ""
    for line in process.stderr:
        trial = line if line.startswith("trial ") else trial
        if line.startswith("epoch 2/") and trial.startswith("trial 3"):
            process.kill()
    assert process.wait() == -9, trial
    assert len(lines_of(output)) == 2
    written = (output / "runs" / "trial-0" / "report.json").stat().st_mtime_ns
    again, kept = run(folder, output), ("trial", "state", *VALUES, "epochs")
    assert (output / "runs" / "trial-0" / "report.json").stat().st_mtime_ns == written
    one, other = ([[line[key] for key in kept] for line in each.lines] for each in (again, found))
    assert one == other
    assert not list(output.glob("runs/*/checkpoints"))


def test_more_trials_and_wider_ranges_continue(folder: Path, found: Outcome) -> None:
    wider = dataclasses.replace(SEARCH, ranges={**SEARCH.ranges, "dense_lr": (1e-6, 10.0)})
    more = run(folder, folder / "study", search=wider, trials=TRIALS + 1)
    assert more.lines[:TRIALS] == found.lines
    assert len(more.lines) == TRIALS + 1
    with pytest.raises(ValueError, match=r"another configuration: it has checkpoint.keep_best = 'logloss', but 'auc'"):
        run(folder, folder / "study", search=dataclasses.replace(SEARCH, metric="auc"))


def test_a_trial_whose_loss_is_not_finite_fails_and_the_study_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder is whole until its line is kept."""
    whole: list[bool] = []

    def add(runs: Runs, line: dict[str, Any], add: Callable = Runs.add) -> None:
        whole.append((runs.folder_of(f"trial-{line['trial']}") / "vocabulary").exists())
        add(runs, line)

    monkeypatch.setattr(Runs, "add", add)
    search = Search(51, "auc", {"dense_lr": (5e-3, 1e37), "embedding_lr": None, "l2": None}, patience=0)
    outcome = run(folder, tmp_path / "out", "train.epochs=1", search=search, trials=4)
    failed = [line for line in outcome.lines if line["state"] == "failed"]
    assert failed, outcome.lines
    assert all(line["error"].startswith("NonFiniteLoss: the loss was not finite") for line in failed)
    assert whole == [line in failed for line in outcome.lines]
    assert not list((tmp_path / "out").glob("runs/*/vocabulary"))
    assert outcome.best is not None
    assert outcome.best["validation_auc"] == max(line.get("validation_auc", 0) for line in outcome.lines)


def test_a_rate_too_high_for_the_weight_decay_is_a_failed_trial(folder: Path, tmp_path: Path) -> None:
    """No such run is started; Optuna learns from it as from a diverged one."""
    search = Search(51, "auc", {"dense_lr": (5e-3, 1e6), "embedding_lr": None, "l2": None}, patience=0)
    overrides = ("train.epochs=1", "optimizer.dense_weight_decay=0.5")
    outcome = run(folder, tmp_path / "out", *overrides, search=search, trials=4)
    for line in outcome.lines:
        assert (line["state"] == "failed") == (line["dense_lr"] > 2), "a step of more than the whole weight"
        assert line["state"] == "complete" or "of each weight in a step" in line["error"]
        assert (tmp_path / "out" / "runs" / f"trial-{line['trial']}").exists() == (line["state"] == "complete")
    assert {line["state"] for line in outcome.lines} == {"complete", "failed"}
    assert outcome.best is not None


def test_values_at_the_edge_and_the_last_epoch_are_named() -> None:
    best, ranges = {"dense_lr": 0.9e-3, "l2": 1e-5, "best_epoch": 3}, {"dense_lr": (1e-5, 1e-3), "l2": (1e-6, 1e-4)}
    (message,) = hints(best, ranges, 4)
    assert "dense_lr = 0.0009 is at the edge of the searched 1e-05 to 0.001" in message
    assert "continue with --dense-lr 1e-05,0.01 and more --trials" in message
    low, epochs = hints({"l2": 1e-6, "best_epoch": 4}, {"l2": (1e-6, 1e-4)}, 4)
    assert "--l2 1e-07,0.0001" in low
    assert "--set train.epochs=8" in epochs
    assert not hints({"l2": 1e-5, "best_epoch": 1}, {"l2": (1e-6, 1e-4)}, 1)


def test_the_command_prints_the_best_trials(cowrec: Cowrec, folder: Path, found: Outcome) -> None:
    code, printed, said = cowrec(*command(folder, folder / "study"), "--trials", "3")
    assert (code, "trial 1 of" in said) == (0, False), "something was trained again"
    assert found.best is not None
    assert f"{found.best['validation_logloss']:.5f}" in printed
