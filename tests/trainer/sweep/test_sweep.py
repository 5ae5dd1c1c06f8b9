"""Sweeps and studies against single runs: failed and killed runs, repeated calls; tables, plots and hints."""

import dataclasses
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from optuna.trial import TrialState

from commands.command_line import Cowrec
from commands.forked_commands import Forked
from cowrec.data_pipeline import Schema
from cowrec.trainer import load_config, train
from cowrec.trainer.sweep.results import plot_sweep, sweep_table
from cowrec.trainer.sweep.sweep import COMPETITORS, Grid, clip_summary, default_rules, sweep
from cowrec.trainer.sweep.tune import Outcome, Search, hints, study_of, tune
from refusal import refused
from trained_runs import data_folder
from trainer_cases import config_file, make_data

GRID = Grid([51, 102], ["cowclip", "linear"], ["on", "off"], 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    make_data(folder)
    file = config_file(folder)
    file.write_text(file.read_text().replace("l2 = 1e-4\n", ""))  # its default follows the samples
    run_sweep(folder, folder / "grid")
    return folder


def run_sweep(folder: Path, output: Path, *overrides: str, grid: Grid = GRID) -> list[dict[str, Any]]:
    return sweep(load_config(folder / "run.toml", overrides), folder / "data", output, grid)


def lines_of(output: Path) -> list[dict[str, Any]]:
    text = (output / "sweep.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def key(line: dict[str, Any]) -> tuple:
    return line["rule"], line["batch_size"], line["clip"], line["seed"]


def test_a_line_equals_the_report_of_a_single_run(folder: Path, tmp_path: Path) -> None:
    """Compares runs of equal seeds at twice the base batch, where cowclip doubles l2 and scales the dense rate."""
    lines = {key(line): line for line in lines_of(folder / "grid")}
    assert len(lines) == 8
    line = lines["cowclip", 102, "on", 0]
    alone = train(load_config(folder / "run.toml", ["train.batch_size=102"]), folder / "data", tmp_path / "alone")
    for same in ("auc", "logloss", "steps", "versions", "device", "git_commit", "best_possible"):
        assert line[same] == alone[same]
    assert line["threads"] >= 1  # those of the process that runs are forked from, which another test may have started
    assert (line["steps"], line["epochs"], line["base_batch_size"]) == (2 * 3, 2, 51)
    assert line["best_epoch_auc"] == max(epoch["auc"] for epoch in alone["epochs"])
    assert line["clipped_share"] == alone["clip_statistics"]["clipped_share"] > 0
    assert (line["by_epoch"], line["clip_remark"]) == (alone["epochs"], None)
    derived = {name: line[name] for name in ("embedding_lr", "dense_lr", "l2")}
    assert derived == pytest.approx({"embedding_lr": 1e-2, "dense_lr": 1e-2 * 2**0.5, "l2": 2e-2})
    assert lines["linear", 102, "off", 0]["embedding_lr"] == pytest.approx(2e-2)
    assert lines["cowclip", 102, "off", 0]["clipped_share"] is None
    assert lines["cowclip", 102, "off", 0]["logloss"] != line["logloss"]
    shared = (folder / "grid" / "config.toml").read_bytes()
    assert {line["config_sha256"] for line in lines.values()} == {hashlib.sha256(shared).hexdigest()}


def test_a_line_equals_the_report_of_a_single_run_that_ends_by_its_validation_quality(
    folder: Path, tmp_path: Path
) -> None:
    auto = ["train.epochs=auto", "train.validation_fraction=0.3", "optimizer.lr_decay=none"]
    line = run_sweep(folder, tmp_path / "grid", *auto, grid=Grid([102], ["linear"], ["on"], 1))[0]
    alone = load_config(folder / "run.toml", [*auto, "train.batch_size=102", "optimizer.scaling=linear"])
    report = train(alone, folder / "data", tmp_path / "alone")
    assert line["epochs"] == len(report["epochs"]) == line["best_epoch"] + 4  # an epoch has fewer than 25 steps
    assert (line["auc"], line["best_epoch"]) == (report["auc"], report["epoch"])


def test_runs_on_data_that_were_prepared_anew_are_not_compared(folder: Path, tmp_path: Path) -> None:
    data = shutil.copytree(folder / "data", tmp_path / "data")
    config, grid = load_config(folder / "run.toml", ["train.epochs=1"]), Grid([51], ["linear"], ["off"], 1)
    sweep(config, data, tmp_path / "grid", grid)
    schema, larger = Schema.load(data), dataclasses.replace(grid, batch_sizes=[51, 102])
    layout, prepared = (dict(schema.settings[name]) for name in ("layout", "prepare"))
    layout["fields"] = [{**field, "column": "price"} for field in layout["fields"]]
    for changes, why in (
        ({"sources": ()}, "it was prepared from other files"),
        ({"settings": {"prepare": prepared, "layout": layout}}, r"it was prepared with other settings \(layout\)"),
        ({"labels": ("other",)}, "its fields, their sizes or scales, or its labels differ"),
    ):
        dataclasses.replace(schema, **changes).save(data)
        message = f"grid has runs on other samples than .*data: {why}; results would not"
        refused(message, sweep, config, data, tmp_path / "grid", larger)
    # What changes no sample, and the values that None means.
    same = {"max_bad_rows": 7, "shard_rows": 9999, "test_fraction": 0.1}
    assert prepared["test_fraction"] is None
    settings = {**schema.settings, "prepare": prepared | same}
    dataclasses.replace(schema, settings=settings).save(data)
    assert len(sweep(config, data, tmp_path / "grid", grid)) == 1


def test_run_folders_are_those_of_train_without_checkpoints(folder: Path) -> None:
    """All rules share one run at the base batch size, in the folder of the first rule."""
    runs = {path.name for path in (folder / "grid" / "runs").iterdir()}
    assert (len(runs), "linear-51-clip_on-seed0" in runs) == (6, False)
    lines = {key(line): line for line in lines_of(folder / "grid")}
    assert {**lines["linear", 51, "on", 0], "rule": "cowclip"} == lines["cowclip", 51, "on", 0]
    run = folder / "grid" / "runs" / "linear-102-clip_off-seed0"
    saved = load_config(run / "config.toml")
    assert (saved.optimizer.scaling, saved.train.batch_size, saved.clip.rule) == ("linear", 102, "none")
    assert {"report.json", "metrics.jsonl", "tensorboard"} <= {path.name for path in run.iterdir()}
    assert not {"checkpoints", "vocabulary"} & {path.name for path in run.iterdir()}


def test_a_larger_grid_adds_runs(folder: Path) -> None:
    before = lines_of(folder / "grid")
    reports = {file: file.stat().st_mtime_ns for file in (folder / "grid").rglob("report.json")}
    found = run_sweep(folder, folder / "grid", grid=Grid([102], ["linear"], ["on"], 2))
    assert [key(line) for line in found] == [("linear", 102, "on", 0), ("linear", 102, "on", 1)]
    assert found[0]["auc"] != found[1]["auc"]
    assert lines_of(folder / "grid") == [*before, found[1]]
    assert {file: file.stat().st_mtime_ns for file in reports} == reports
    # A run whose line was lost is not trained again.
    file, complete = folder / "grid" / "sweep.jsonl", lines_of(folder / "grid")
    file.write_text("".join(json.dumps(line) + "\n" for line in complete[:-1]))
    report = folder / "grid" / "runs" / "linear-102-clip_on-seed1" / "report.json"
    written = report.stat().st_mtime_ns
    run_sweep(folder, folder / "grid", grid=Grid([102], ["linear"], ["on"], 2))
    assert (lines_of(folder / "grid"), report.stat().st_mtime_ns) == (complete, written)


@pytest.mark.thorough
def test_killed_runs_and_a_killed_sweep(folder: Path, tmp_path: Path) -> None:
    """The first of four runs is killed and recorded as failed, the sweep in the third; the next call resumes that."""
    epochs, output = 25, tmp_path / "out"
    command = ["sweep", folder / "run.toml", "--data", folder / "data", "--output", output, "--batch-sizes", "51"]
    process = Forked(*command, "--rules", "linear", "--seeds", "2", "--set", f"train.epochs={epochs}")
    run, printed = 0, ""
    for line in process.stderr:
        printed += line
        run += line.startswith("run ")
        if line.startswith("epoch 1/") and run == 1:
            psutil.Process(process.pid).children(recursive=True)[-1].kill()
        if line.startswith("epoch 3/") and run == 3:  # the checkpoint of the first epoch has been written
            process.kill()
    # The loop has ended, so no process has the pipe open: the run has ended with its sweep.
    process.wait()
    left = lines_of(output)
    assert [key(line) for line in left] == [("linear", 51, "on", 0), ("linear", 51, "off", 0)], printed
    assert (left[0]["error"], left[0]["dense_lr"]) == ("the process ended by signal 9", 1e-2)
    assert (left[0]["versions"], "auc" in left[0]) == (left[1]["versions"], False)
    assert left[1]["steps"] == 5 * epochs
    third = output / "runs" / "linear-51-clip_on-seed1"
    assert (third.exists(), (third / "report.json").exists()) == (True, False)
    report = output / "runs" / "linear-51-clip_off-seed0" / "report.json"
    written = report.stat().st_mtime_ns
    killed = (third / "metrics.jsonl").read_bytes().splitlines()
    found = run_sweep(folder, output, f"train.epochs={epochs}", grid=Grid([51], ["linear"], ["on", "off"], 2))
    # The log goes on after the checkpoint, so lines with their times are left from before.
    assert (third / "metrics.jsonl").read_bytes().splitlines()[:4] == killed[:4]
    assert report.stat().st_mtime_ns == written
    assert (found, found[:2]) == (lines_of(output), left)
    assert [line["seed"] for line in found] == [0, 0, 1, 1]
    assert [line["steps"] for line in found[1:]] == [5 * epochs] * 3
    assert "(1 of 2)" in sweep_table(found)


def test_failed_runs_are_recorded_and_the_others_continue(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decay = ["optimizer.dense_weight_decay=0.5", "optimizer.dense_lr=0.01", "train.epochs=1"]
    refused, good = run_sweep(folder, tmp_path / "decay", *decay, grid=Grid([51000, 51], ["linear"], ["on"], 1))
    assert "of each weight in a step" in refused["error"]
    assert "error" not in good
    astray = ["optimizer.dense_lr=1e30", "optimizer.warmup_epochs=0"]
    grid = Grid([51], ["none", "linear"], ["off"], 1)
    line, other = run_sweep(folder, tmp_path / "astray", *astray, grid=grid)
    assert line["error"].startswith("NonFiniteLoss: the loss was not finite")
    assert plot_sweep([line], tmp_path / "empty.png").exists()
    assert "linear-51-clip_off-seed0 is none's run" in capsys.readouterr().err
    assert other == {**line, "rule": "linear"}
    # A failed run whose line has been deleted is repeated, though another rule's line still has its error.
    results = tmp_path / "astray" / "sweep.jsonl"
    results.write_text(results.read_text().splitlines()[0] + "\n\n")
    assert run_sweep(folder, tmp_path / "astray", *astray, grid=grid)[1]["error"] == line["error"]
    assert "is none's run" not in capsys.readouterr().err


def test_remarks_and_default_rules(folder: Path) -> None:
    own = [load_config(folder / "run.toml", [f"optimizer.scaling={rule}"]) for rule in ("cowclip", "sqrt_star")]
    assert list(map(default_rules, own)) == [[*COMPETITORS], ["sqrt_star", *COMPETITORS]]
    lines: list[dict] = [{"clipped_share": 0.0, "clip_remark": "never"}, {"clipped_share": 0.2, "clip_remark": None}]
    lines.append({"clipped_share": None})
    assert clip_summary(lines).startswith("the clip had no effect, or almost none, in 1 of 2 runs with clip on")
    assert clip_summary(lines[1:]) == ""


def test_the_command_prints_the_table(cowrec: Cowrec, folder: Path) -> None:
    arguments = [folder / "run.toml", "--data", folder / "data", "--output", folder / "grid", "--batch-sizes", "51,102"]
    code, printed, said = cowrec("sweep", *arguments, "--rules", "cowclip,linear", "--seeds", "1")
    assert (code, said) == (0, ""), "something was trained again"
    assert "warning: batch 102 has 6 steps, below 200: too few steps to judge a rule\n" in printed
    (line,) = [line for line in lines_of(folder / "grid") if key(line) == ("cowclip", 102, "on", 0)]
    assert f"{line['auc']:.4f}" in printed
    assert printed.endswith(f"plot: {folder}/grid/sweep.png\n")
    assert (folder / "grid" / "sweep.png").exists()


def test_folders_in_use_are_refused(folder: Path, tmp_path: Path) -> None:
    before = lines_of(folder / "grid")
    other = r"another configuration: it has optimizer.l2 = 0.01, but 0.5 is requested; choose another"
    refused(other, run_sweep, folder, folder / "grid", "optimizer.l2=0.5")
    refused("is not empty and not the folder of a sweep", run_sweep, folder, folder / "data")
    refused("is a file; choose another", run_sweep, folder, folder / "run.toml")
    handle = os.open(folder / "grid", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    refused("another process is at work in", run_sweep, folder, folder / "grid")
    os.close(handle)
    assert lines_of(folder / "grid") == before
    assert not list((folder / "grid").glob("*.partial"))


SHARED = {"model": "deepfm", "data": "clicks", "device": "a CPU", "best_possible": {"auc": 0.9, "logloss": 0.3}}
BASE = [0.80, 0.81, 0.82]
STEPS = {64: 31_250, 8192: 244, 16384: 122}


def lines_with(aucs: dict[tuple[str, int], Sequence[float]], clip: str = "on", **more: Any) -> list[dict[str, Any]]:
    return [
        {
            **SHARED,
            **{"rule": rule, "batch_size": size, "clip": clip, "seed": seed, "base_batch_size": 64},
            **{"auc": auc, "best_epoch_auc": auc, "logloss": 1 - auc, "steps": STEPS.get(size), **more},
        }
        for (rule, size), values in aucs.items()
        for seed, auc in enumerate(values)
    ]


def row(text: str, block: str, name: str) -> list[str]:
    """Cells of a row of the table whose first cell starts with `block`."""
    (found,) = [part for part in text.split("\n\n") if re.match(rf"{re.escape(block)}  ", part)]
    (cells,) = [line.split("  ") for line in found.splitlines() if line.startswith(name)]
    return [cell.strip() for cell in cells if cell.strip()][1:]


def test_differences_from_the_base_and_its_spread() -> None:
    """The base's deviation is 0.01: 0.815 is within it, 0.799 and 0.821 are outside."""
    aucs = {("cowclip", 64): BASE, ("cowclip", 8192): [0.799] * 3, ("cowclip", 16384): [0.821] * 3}
    aucs |= {("linear", 64): BASE[:2], ("linear", 8192): [0.815] * 3, ("linear", 16384): [0.5, 0.6, 0.7]}
    text = sweep_table(lines_with(aucs))
    base = "0.8100 ± 0.0100"
    of_cowclip = [base, "0.7990 ± 0.0000, -0.0110 lost", "0.8210 ± 0.0000, +0.0110 better"]
    assert row(text, "test AUC", "cowclip") == of_cowclip
    of_linear = ["0.8050 ± 0.0071 (2 of 3)", "0.8150 ± 0.0000, +0.0050 within", "0.6000 ± 0.1000, -0.2100 lost"]
    assert row(text, "test AUC", "linear") == of_linear
    logloss = ["0.1900 ± 0.0100", "0.2010 ± 0.0000, +0.0110 lost", "0.1790 ± 0.0000, -0.0110 better"]
    assert row(text, "test logloss", "cowclip") == logloss
    assert row(text, "test AUC", "steps") == ["31,250", "244", "122"]
    assert "warning: batch 16K has 122 steps, below 200: too few steps to judge a rule" in text
    assert "batch 8K has" not in text
    assert "At the base, batch 64, all rules are one run, trained once for each seed." in text
    assert "best epoch" not in text
    assert "expected logloss" not in text


def test_each_clip_is_compared_with_its_own_base_and_one_seed_has_no_spread() -> None:
    lines = lines_with({("none", 64): [0.8], ("none", 8192): [0.7]})
    lines += lines_with({("none", 64): [0.6], ("none", 8192): [0.65]}, clip="off")
    lines.append({**lines[0], "rule": "linear", "batch_size": 8192, "auc": None, "error": "killed"})
    lines.append({**lines[0], "rule": "linear", "batch_size": 16384, "auc": None})  # of one class
    text = sweep_table(lines)
    assert row(text, "test AUC", "none, clip on") == ["0.8000", "0.7000, -0.1000", "-"]
    assert row(text, "test AUC", "none, clip off") == ["0.6000", "0.6500, +0.0500", "-"]
    assert row(text, "test AUC", "linear, clip on") == ["-", "failed", "-"]
    assert "its spread is unknown; give --seeds 3 or more" in text
    failed = [{key: line[key] for key in line if key != "auc"} for line in lines]
    assert "No run of the base, batch 64, has an AUC" in sweep_table(failed)
    without = sweep_table([line for line in lines if line["batch_size"] != 64])
    assert without.endswith("The base, batch 64, is not in this sweep; add it to see what a batch loses.")


TRIALS = 6
OVERRIDES = ["train.epochs=3", "optimizer.warmup_epochs=0", "data.resident=yes"]
SEARCH = Search(102, ranges={"embedding_lr": None, "dense_lr": (1e-4, 1.0)}, validation_fraction=0.2)
VALUES = ("embedding_lr", "dense_lr", "l2")


single = data_folder("price", "city")


@pytest.fixture(scope="module")
def found(single: Path) -> Outcome:
    return run_study(single, single / "study")


def run_study(single: Path, output: Path, *overrides: str, search: Search = SEARCH, trials: int = TRIALS) -> Outcome:
    config = load_config(single / "run.toml", [*OVERRIDES, *overrides])
    return tune(config, single / "data", output, search, trials)


def tune_command(single: Path, output: Path) -> list[str]:
    """Arguments of ``cowrec`` for the search."""
    given = f"tune {single}/run.toml --data {single}/data --output {output} --batch-size 102 --trials {TRIALS}"
    given += " --validation-fraction 0.2 --embedding-lr fixed --dense-lr 1e-4,1"
    return [*given.split(), *(part for override in OVERRIDES for part in ("--set", override))]


def trials_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "tune.jsonl").read_text().splitlines()]


def test_optuna_learns_from_the_values_and_qualities_of_the_lines(single: Path, found: Outcome) -> None:
    """The first trial is the configuration by CowClip's rule at twice the base batch: dense rate * sqrt 2, L2 * 2."""
    lines = trials_of(single / "study")
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


def test_tuned_toml_trains_what_the_best_trial_did(single: Path, found: Outcome, tmp_path: Path) -> None:
    file = single / "study" / "tuned.toml"
    tuned, best = load_config(file), found.best
    assert best is not None
    comment = f"# found by cowrec tune at batch size 102: trial {best['trial'] + 1} of {TRIALS}\n"
    assert file.read_text().startswith(comment)
    assert {name: getattr(tuned.optimizer, name) for name in VALUES} == {name: best[name] for name in VALUES}
    assert (tuned.optimizer.base_batch_size, tuned.train.batch_size) == (102, 102)
    assert (tuned.train.epochs, tuned.train.validation_fraction) == (best["best_epoch"], 0.0)
    alone = load_config(file, ["train.validation_fraction=0.2"])
    assert train(alone, single / "data", tmp_path / "alone")["validation_logloss"] == best["validation_logloss"]


@pytest.mark.thorough
def test_a_killed_study_goes_on_as_if_it_had_not_been(single: Path, found: Outcome, tmp_path: Path) -> None:
    output = tmp_path / "out"
    process = Forked(*tune_command(single, output))
    trial = ""
    for line in process.stderr:
        trial = line if line.startswith("trial ") else trial
        if line.startswith("epoch 2/") and trial.startswith("trial 3"):
            process.kill()
    assert process.wait() == -9, trial
    assert len(trials_of(output)) == 2
    written = (output / "runs" / "trial-0" / "report.json").stat().st_mtime_ns
    again, kept = run_study(single, output), ("trial", "state", *VALUES, "epochs")
    assert (output / "runs" / "trial-0" / "report.json").stat().st_mtime_ns == written
    one, other = ([[line[key] for key in kept] for line in table.lines] for table in (again, found))
    assert one == other
    assert not list(output.glob("runs/*/checkpoints"))


def test_more_trials_and_wider_ranges_continue(single: Path, found: Outcome) -> None:
    wider = dataclasses.replace(SEARCH, ranges={**SEARCH.ranges, "dense_lr": (1e-6, 10.0)})
    more = run_study(single, single / "study", search=wider, trials=TRIALS + 1)
    assert more.lines[:TRIALS] == found.lines
    assert len(more.lines) == TRIALS + 1


def test_a_trial_whose_loss_is_not_finite_fails_and_the_study_goes_on(single: Path, tmp_path: Path) -> None:
    search = Search(51, "auc", {"dense_lr": (5e-3, 1e37), "embedding_lr": None, "l2": None}, patience=0)
    outcome = run_study(single, tmp_path / "out", "train.epochs=1", search=search, trials=4)
    failed = [line for line in outcome.lines if line["state"] == "failed"]
    assert failed, outcome.lines
    assert all(line["error"].startswith("NonFiniteLoss: the loss was not finite") for line in failed)
    assert outcome.best is not None
    assert outcome.best["validation_auc"] == max(line.get("validation_auc", 0) for line in outcome.lines)


def test_values_at_the_edge_and_the_last_epoch_are_named() -> None:
    best, ranges = {"dense_lr": 0.9e-3, "l2": 1e-5, "best_epoch": 3}, {"dense_lr": (1e-5, 1e-3), "l2": (1e-6, 1e-4)}
    (message,) = hints(best, ranges, 4)
    assert "dense_lr = 0.0009 is at the edge of the searched 1e-05 to 0.001" in message
    assert "continue with --dense-lr 1e-05,0.01 and more --trials" in message
    low, epochs = hints({"l2": 1e-6, "best_epoch": 4}, {"l2": (1e-6, 1e-4)}, 4)
    assert "--l2 1e-07,0.0001" in low
    assert "--set train.epochs=8" in epochs
    assert not hints({"l2": 1e-5, "best_epoch": 1}, {"l2": (1e-6, 1e-4)}, 1)


def test_the_command_prints_the_best_trials(cowrec: Cowrec, single: Path, found: Outcome) -> None:
    code, printed, said = cowrec(*tune_command(single, single / "study"), "--trials", "3")
    assert (code, "trial 1 of" in said) == (0, False), "something was trained again"
    assert found.best is not None
    assert f"{found.best['validation_logloss']:.5f}" in printed
