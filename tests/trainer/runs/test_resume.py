"""Resuming: bit-identical to an uninterrupted run; damaged, foreign and malicious checkpoints are refused."""

import hashlib
import io
import json
import logging
import os
import pickle
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from cowrec.files import checksum, locked_folder
from cowrec.trainer.config.run import load_config, save_config
from cowrec.trainer.config.sections import CheckpointConfig
from cowrec.trainer.runs import checkpoint
from cowrec.trainer.runs.checkpoint import Checkpoints, checkpoint_name, find_checkpoint, list_checkpoints
from cowrec.trainer.runs.local_copy import RunPlace
from cowrec.trainer.runs.run_dir import require_unused
from cowrec.trainer.runtime.errors import Interrupted
from cowrec.trainer.runtime.processes import process_group
from cowrec.trainer.training import evaluation
from cowrec.trainer.training.evaluation import predictions
from cowrec.trainer.training.saved_run import evaluate_run
from cowrec.trainer.training.trainer import train
from refusal import refused
from run_comparison import assert_same, state_of
from tiers import tiered
from trained_runs import data_folder, make_folder
from trained_runs import metrics as metrics_of
from trained_runs import run as run_of
from trainer_cases import OPTIMIZERS, interrupted

ALWAYS = ["model.dropout=0.3", "checkpoint.every_steps=3", "checkpoint.keep_last=100"]
"""Five steps an epoch: checkpoints at 3, 5, 6, 9 and 10. Dropout needs the random state."""


folder = data_folder("price", "city")


def run(folder: Path, run_dir: Path, *overrides: str, resume: bool = False) -> dict[str, Any]:
    return run_of(folder, run_dir, *ALWAYS, *overrides, resume=resume)


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> Path:
    run(folder, folder / "uninterrupted")
    return folder / "uninterrupted"


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    lines = [line for kind in ("train", "eval", "clip") for line in metrics_of(run_dir, kind)]
    return [{key: value for key, value in line.items() if key != "samples_per_second"} for line in lines]


IDS = ["id_table.kind=collisionless", "id_table.capacity=100"]
SETTINGS = OPTIMIZERS | {
    "id table": [*IDS, "optimizer.embedding=adagrad"],
    "full id table": [*IDS, "id_table.capacity=6", "id_table.when_full=oldest"],
    "counted ids": [*IDS, "id_table.admission=count", "id_table.threshold=4"],
    "several passes": ["train.accumulation=3"],
    "average": ["train.average=true"],
    "drawn ids": [*IDS, "id_table.admission=probabilistic", "id_table.threshold=4", "optimizer.embedding=adagrad"],
}


FUSED_STATE: dict[str, dict[str, int]] = {
    "sgd": {},
    "adagrad": {"momentum1": 2},
    "rowwise_adagrad": {"momentum1": 1},
    "fbgemm_cowclip": {"momentum1": 1, "prev_iter": 1, "row_counter": 1},
}
"""What FBGEMM's optimizers keep, and its dimensions: of each row, or of each element."""


@pytest.mark.parametrize("name", tiered(SETTINGS, SETTINGS.keys() - {"dense", "sgd", "adagrad"}))
def test_a_resumed_run_is_bit_identical(folder: Path, tmp_path: Path, name: str) -> None:
    """Resumed in the second epoch, or in the first; with replay, of fields of all kinds, in both and between them."""
    settings = SETTINGS[name]
    if name == "replay":
        settings = [*settings, "train.average=false"]  # each state of the mean brings all rows up to date
        folder = make_folder(tmp_path)
    report = run(folder, tmp_path / "uninterrupted", *settings)
    if name in FUSED_STATE:
        state = state_of(tmp_path / "uninterrupted", "embedding_optimizer")
        assert {key.rpartition(".")[2]: value.dim() for key, value in state.items()} == FUSED_STATE[name]
    if name == "replay":
        state = state_of(tmp_path / "uninterrupted", "embedding_optimizer")
        behind = [value.unique() for key, value in state.items() if key.endswith("/last_step")]
        assert any(len(rows) > 1 for rows in behind), "saving brings no row up to date"
    for at in {"replay": (3, 5, 6)}.get(name, (6,) if name in OPTIMIZERS else (3,)):
        copy = interrupted(tmp_path / "uninterrupted", at, tmp_path / f"at{at}")
        resumed = run(folder, copy, *settings, resume=True)
        assert_same(copy, tmp_path / "uninterrupted")
        assert metrics(copy) == metrics(tmp_path / "uninterrupted")
        for key in ("auc", "logloss", "steps", "epochs"):
            assert resumed[key] == report[key]
        if clip := report["clip_statistics"]:
            assert resumed["clip_statistics"]["rows"] == clip["rows"]
            assert resumed["clip_statistics"]["clipped_share"] == pytest.approx(clip["clipped_share"])
        assert not list(copy.rglob("*.partial"))


def test_resuming_without_a_checkpoint_starts_and_after_the_end_reports(
    folder: Path, uninterrupted: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(folder, tmp_path / "new", resume=True)
    assert_same(tmp_path / "new", uninterrupted)
    assert run(folder, tmp_path / "new", resume=True)["steps"] == 10
    without_checkpoints = interrupted(uninterrupted, 0, tmp_path / "without_checkpoints")
    run(folder, without_checkpoints, resume=True)
    assert_same(without_checkpoints, uninterrupted)
    longer = run(folder, tmp_path / "longer", "train.epochs=3")
    assert run(folder, tmp_path / "new", "train.epochs=3", resume=True)["auc"] == longer["auc"]
    assert "(the data set has" not in caplog.text
    run(folder, tmp_path / "late", "train.epochs=1", "prepare.min_count=50", "prepare.on_bad_row=error")
    assert "warning: prepare.min_count = 50 (the data set has 1) has no effect on a data set that is" in caplog.text


def test_other_settings_are_refused(folder: Path, uninterrupted: Path, tmp_path: Path) -> None:
    before = sorted(uninterrupted.rglob("*"))
    with pytest.raises(ValueError, match=r"another configuration: it has optimizer.l2 = 0.0001, but 0.5 is requested"):
        run(folder, uninterrupted, "optimizer.l2=0.5", resume=True)
    refused(r"is not a run: it has no config.toml", run, folder, folder / "data", resume=True)
    refused("has a complete run; add --resume", run, folder, uninterrupted)
    shutil.copytree(uninterrupted, tmp_path / "decayed")
    config = load_config(uninterrupted / "config.toml", ["optimizer.lr_decay=linear"])
    save_config(config, tmp_path / "decayed" / "config.toml")
    refused("whose rates have decayed; begin another with train.warm_start", run, folder, tmp_path / "decayed")
    shutil.copytree(uninterrupted, tmp_path / "stream")
    (tmp_path / "stream" / "journal").mkdir()
    refused("has a run whose stream ended; add --resume to follow it", require_unused, tmp_path / "stream")
    with locked_folder(uninterrupted):
        for resume in (True, False):
            refused("another process is at work in", run, folder, uninterrupted, resume=resume)
    assert sorted(uninterrupted.rglob("*")) == before


def test_an_epoch_ends_on_the_kind_of_device_it_began_on(folder: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """CPU and CUDA draw different orders of samples; between two epochs a run may change its device."""
    for at in (3, 5):
        step = interrupted(uninterrupted, at, tmp_path / f"at{at}") / "checkpoints" / f"step_{at:09d}"
        rewrite_manifest(step, lambda content: content["progress"].update(device="cuda"))
    with pytest.raises(ValueError, match=r"000000003 is in .* epoch that began on cuda, and cpu .*device = .cuda"):
        run(folder, tmp_path / "at3", resume=True)
    run(folder, tmp_path / "at5", resume=True)
    assert_same(tmp_path / "at5", uninterrupted)


def test_a_large_state_is_in_several_files(
    folder: Path, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_FILE_BYTES", 1 << 10)
    monkeypatch.setattr(checkpoint, "available_cores", lambda: 3)
    copy = interrupted(uninterrupted, 5, tmp_path / "copy")
    run(folder, copy, resume=True)
    shutil.rmtree(copy / "checkpoints" / checkpoint_name(10))
    files = (copy / "checkpoints" / checkpoint_name(9)).glob("*.distcp")
    assert sorted(file.name for file in files) == ["__0_0.distcp", "__0_1.distcp", "__0_2.distcp"]
    run(folder, copy, resume=True)
    assert_same(copy, uninterrupted)


def rewrite_manifest(step: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the manifest of a checkpoint, with a checksum that matches."""
    content = json.loads((step / "checkpoint.json").read_text())
    del content["sha256"]
    change(content)
    content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (step / "checkpoint.json").write_text(json.dumps(content))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


CHECKSUM = "__0_0.distcp has another checksum"
DAMAGES: dict[str, Callable[[Path], Any]] = {
    "it has no .metadata": lambda step: (step / ".metadata").unlink(),
    "__0_0.distcp has 500 bytes instead of": lambda step: (step / "__0_0.distcp").write_bytes(b"x" * 500),
    "it has no __0_0.distcp": lambda step: (step / "__0_0.distcp").unlink(),
    CHECKSUM: lambda step: flip(step / "__0_0.distcp"),
    "checkpoint.json or its checksum is missing": lambda step: (step / "checkpoint.json").unlink(),
    "checkpoint.json cannot be read": lambda step: (step / "checkpoint.json").write_text('{"format": 1, "pro'),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_damage_is_reported_and_the_checkpoint_before_is_used(
    folder: Path, uninterrupted: Path, tmp_path: Path, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    copy = shutil.copytree(uninterrupted, tmp_path / "copy")
    DAMAGES[message](copy / "checkpoints" / "step_000000010")
    with process_group("cpu") as process:
        found = find_checkpoint(copy / "checkpoints", process)
    assert found is not None
    assert found[0].name == "step_000000009"
    (line,) = caplog.messages
    assert all(part in line for part in ("step_000000010 is damaged", message, "step_000000009 instead"))
    if message != CHECKSUM:
        return
    evaluate_run(copy, folder / "data")
    with caplog.at_level(logging.INFO, "cowrec"):
        run(folder, copy, resume=True)
    assert "continuing from" in caplog.text
    assert_same(copy, uninterrupted)
    for step in (copy / "checkpoints").iterdir():
        flip(step / "__0_0.distcp")
    refused(r"no checkpoint of .* can be used: .*step_000000010 is damaged", run, folder, copy, resume=True)


def test_a_flipped_bit_in_a_manifest_is_harmless_or_noticed(uninterrupted: Path, tmp_path: Path) -> None:
    """It changes nothing, or the checkpoint before is used."""
    copy = shutil.copytree(uninterrupted / "checkpoints", tmp_path / "copy")
    manifest, skipped = copy / "step_000000010" / "checkpoint.json", 0
    content = manifest.read_bytes()
    with process_group("cpu") as process:
        intact, before = (find_checkpoint(copy, process, step=step) for step in (10, 9))
        for bit in random.Random(0).sample(range(8 * len(content)), 100):
            changed = bytearray(content)
            changed[bit // 8] ^= 1 << bit % 8
            manifest.write_bytes(changed)
            found = find_checkpoint(copy, process)
            assert found in (before, intact), bit
            skipped += found == before
    assert skipped > 50  # the others changed the space between two values


def test_other_formats_and_models_are_refused(folder: Path, uninterrupted: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(uninterrupted, tmp_path / "format")
    rewrite_manifest(copy / "checkpoints" / "step_000000010", lambda content: content.update(format=4))
    refused(r"is of format 4, this cowrec reads 1; use the version that wrote it", evaluate_run, copy, folder / "data")
    copy = shutil.copytree(uninterrupted, tmp_path / "model")
    config = copy / "config.toml"
    config.write_text(config.read_text().replace("embedding_dim = 6", "embedding_dim = 9"))
    refused(r"step_000000010 does not fit this run, or is damaged: .*ize", evaluate_run, copy, folder / "data")


def replace_description(copy: Path, pickled: bytes) -> Path:
    """Replaces the library's description of the tensors of step 10, with its checksum in the manifest."""
    step = copy / "checkpoints" / "step_000000010"
    (step / ".metadata").write_bytes(pickled)
    new = [len(pickled), checksum(step / ".metadata")]
    rewrite_manifest(step, lambda content: content["files"].update({".metadata": new}))
    return step


class OlderPickler(pickle.Pickler):
    """Pickles members of enumerations as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_checkpoints_of_other_pythons_are_read(folder: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """Python 3.13 alone has the classes of paths in ``pathlib._local``."""
    copy, pickled = shutil.copytree(uninterrupted, tmp_path / "copy"), io.BytesIO()
    description = (copy / "checkpoints" / "step_000000010" / ".metadata").read_bytes()
    OlderPickler(pickled, protocol=3).dump(pickle.loads(description))
    assert b"getattr" in pickled.getvalue()
    for module in (b"pathlib", b"pathlib._local"):
        written, paths = re.subn(rb"(?<=c)pathlib\S*(?=\nPosixPath\n)", module, pickled.getvalue())
        assert paths
        replace_description(copy, written)
        assert evaluate_run(copy, folder / "data") == evaluate_run(uninterrupted, folder / "data")
    replace_description(copy, b"cbuiltins\ngetattr\n(cpathlib\nPosixPath\nVtouch\ntR.")
    refused("PosixPath'> is not allowed in a checkpoint", evaluate_run, copy, folder / "data")


def test_a_malicious_checkpoint_runs_no_code(folder: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """Its object creates a file when it is unpickled."""
    copy, proof = shutil.copytree(uninterrupted, tmp_path / "copy"), tmp_path / "proof"
    touch = type("Touch", (), {"__reduce__": lambda _: (Path.touch, (proof,))})
    step = replace_description(copy, pickle.dumps(touch()))
    refused("is not allowed in a checkpoint", evaluate_run, copy, folder / "data")
    refused("is not allowed in a checkpoint", run, folder, copy, resume=True)
    assert not proof.exists()
    pickle.loads((step / ".metadata").read_bytes())
    assert proof.exists()


def test_checkpoints_that_are_kept(folder: Path, tmp_path: Path) -> None:
    """The last two and the one after the best epoch are kept."""
    report = run(folder, tmp_path / "run", "train.epochs=4", "checkpoint.keep_last=2", "checkpoint.keep_best=logloss")
    left = {int(path.name.removeprefix("step_")) for path in (tmp_path / "run" / "checkpoints").iterdir()}
    best = min(report["epochs"], key=lambda epoch: epoch["logloss"])["step"]
    assert left == {18, 20, best}


@pytest.mark.parametrize("message", [CHECKSUM])
def test_a_damaged_later_checkpoint_costs_none_that_is_kept(
    folder: Path, uninterrupted: Path, tmp_path: Path, message: str
) -> None:
    """The run goes on before it, and keeps its newest checkpoint, that of the best epoch, and what users copied."""
    copy = interrupted(uninterrupted, 9, tmp_path / "copy")
    kept = shutil.copytree(copy / "checkpoints" / "step_000000005", copy / "checkpoints" / "step_000000005_good")
    DAMAGES[message](copy / "checkpoints" / "step_000000009")
    settings = ["checkpoint.keep_last=1", "checkpoint.keep_best=auc", "checkpoint.every_steps=2"]
    config = load_config(folder / "run.toml", [*ALWAYS, *settings])
    saved = list[list[str]]()

    def saves(self: Checkpoints, *given: Any) -> None:
        save(self, *given)
        self.finish()
        saved.append([path.name for path in list_checkpoints(self.folder)])

    save = Checkpoints.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", saves)
        train(config, folder / "data", copy, resume=True)
    best = "step_000000005"
    assert kept.is_dir()
    assert saved == [
        [best, "step_000000008", "step_000000009"],
        [best, "step_000000010"] if evaluated_best(uninterrupted) == 5 else ["step_000000010"],
    ]


def evaluated_best(run_dir: Path) -> int:
    return int(max(metrics_of(run_dir, "eval"), key=lambda line: line["auc"])["step"])


def test_a_checkpoint_that_replaces_one_of_its_step_outlasts_a_kill(uninterrupted: Path, tmp_path: Path) -> None:
    """Killed after the earlier one has gone and before the new one has its name, or before it is complete."""
    copy = shutil.copytree(uninterrupted, tmp_path / "copy")
    checkpoints = copy / "checkpoints"
    last = checkpoints / "step_000000010"
    last.rename(last.with_suffix(".partial"))
    (checkpoints / "replaced.partial").mkdir()
    incomplete = shutil.copytree(checkpoints / "step_000000009", checkpoints / "step_000000011.partial")
    (incomplete / "checkpoint.json").unlink()
    with process_group("cpu") as process:
        Checkpoints(RunPlace(copy, resume=True), CheckpointConfig(), process).clean()
    assert not list(checkpoints.glob("*.partial"))
    assert [path.name for path in list_checkpoints(checkpoints)][-2:] == ["step_000000009", "step_000000010"]


@contextmanager
def stopped_in_the_first_batch(split: str) -> Iterator[None]:
    """SIGTERM comes once, while samples of a split are measured for the first time."""
    asked = list[bool]()

    def stop_in_first_batch(state: Any, reader: Any, stop: Callable[[], bool]) -> Any:
        for samples in predictions(state, reader, stop):
            if not asked and reader.split == split:
                asked.append(True)
                os.kill(os.getpid(), signal.SIGTERM)
            yield samples

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "predictions", stop_in_first_batch)
        yield


def test_a_stop_during_the_evaluation_is_heard(folder: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """It saves the epoch's last step, from which the run goes on with the evaluation."""
    with stopped_in_the_first_batch("test"), pytest.raises(Interrupted, match=r"at step 5; saved .*step_000000005;"):
        run(folder, tmp_path / "run")
    assert not metrics_of(tmp_path / "run", "eval")
    run(folder, tmp_path / "run", resume=True)
    assert_same(tmp_path / "run", uninterrupted)
    assert metrics(tmp_path / "run") == metrics(uninterrupted)
