"""Checkpoints of a run on disk: their manifests, the check of their files, and which of them are kept.

step_000001000/  checkpoint.json (the manifest)  .metadata  __0_0.distcp (a shard, of rank 0) ...
step_000002000.partial/  (unfinished)
"""

import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from cowrec.data_pipeline.files import checksum, sync_folder, write_file
from cowrec.trainer.config.sections import CheckpointConfig

FORMAT = 3
MANIFEST, _PREFIX, _PARTIAL = "checkpoint.json", "step_", ".partial"
_SHARD = re.compile(r"__(\d+)_\d+\.distcp")

Files = Mapping[str, Sequence[Any]]
"""Size and SHA-256 of files, by name."""


class Damaged(ValueError):
    """Error for a checkpoint that cannot be used; the message names it and the reason."""


@dataclass(frozen=True)
class Progress:
    """Progress of a run at a checkpoint.

    Attributes:
        step: training steps taken.
        epoch: epochs finished and evaluated.
        epoch_step: steps taken in the current epoch.
        device: kind of device, "cpu" or "cuda"; each has its own order of the samples of an epoch.
        epochs: measurements after each epoch.
        samples, seconds: samples trained on so far, and the time their steps took.
        clip: [rows, clipped rows] of each table so far; empty without a clip.
        set_aside: batches that were not trained on, because they would have made the state non-finite.
    """

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    device: str = "cpu"
    epochs: list[dict[str, Any]] = field(default_factory=list)
    samples: int = 0
    seconds: float = 0.0
    clip: dict[str, list[int]] = field(default_factory=dict)
    set_aside: int = 0


def best_epoch(epochs: Sequence[dict[str, Any]], metric: str) -> dict[str, Any] | None:
    """The first epoch with the best "auc" or "logloss": of the validation samples if there are any, else of the test
    split. None if no epoch has a finite value."""
    sign = 1 if metric == "auc" else -1
    values = [(each.get(f"validation_{metric}", each.get(metric)), each) for each in epochs]
    known = [(sign * value, each) for value, each in values if value is not None and isfinite(value)]
    return max(known, key=lambda pair: pair[0])[1] if known else None


def unfinished(folder: Path, step: int) -> Path:
    """Folder in which the checkpoint of a step is written before :func:`seal` gives it its final name."""
    return folder / f"{checkpoint_name(step)}{_PARTIAL}"


def checkpoint_name(step: int) -> str:
    """Name of the folder of a finished checkpoint."""
    return f"{_PREFIX}{step:09d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints of a run, oldest first."""
    return sorted(each for each in folder.glob(f"{_PREFIX}*") if each.suffix != _PARTIAL)


def rank_of(name: str) -> int | None:
    """The process that wrote a file of a checkpoint, if it is a shard; None for another file."""
    found = _SHARD.fullmatch(name)
    return int(found[1]) if found else None


def checksums(files: Iterable[Path]) -> Files:
    """Computes what a manifest lists of files."""
    return {each.name: [each.stat().st_size, checksum(each)] for each in sorted(files)}


def seal(partial: Path, progress: Progress, about: dict[str, Any], keep: CheckpointConfig, elsewhere: Files) -> Path:
    """Adds a manifest with checksums, gives the folder its final name and removes checkpoints that are not kept.

    Args:
        partial: folder of the checkpoint.
        progress: of the run.
        about: further entries of the manifest.
        keep: which checkpoints are kept.
        elsewhere: further files of the checkpoint.

    Raises:
        OSError: the disk is full or cannot be written; earlier checkpoints are not affected.
    """
    files = {**checksums(partial.iterdir()), **elsewhere}
    manifest = {"format": FORMAT, "progress": dataclasses.asdict(progress), **about, "files": files}
    manifest["sha256"] = _own_checksum(manifest)
    write_file(partial / MANIFEST, json.dumps(manifest, indent=1).encode())
    final = partial.with_suffix("")
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    sync_folder(final.parent)
    _prune(final.parent, keep)
    return final


def remove_unfinished(folder: Path) -> None:
    """Removes checkpoints that an earlier process left unfinished."""
    for partial in folder.glob(f"{_PREFIX}*{_PARTIAL}"):
        shutil.rmtree(partial)


def check_files(path: Path, files: Files) -> None:
    """Raises Damaged if files of a checkpoint are missing or do not match their sizes and checksums."""
    for name, (size, sha256) in files.items():
        file = path / name
        if not file.is_file():
            raise Damaged(f"{path} is damaged: it has no {name}")
        if file.stat().st_size != size:
            raise Damaged(f"{path} is damaged: {name} has {file.stat().st_size:,} bytes instead of {size:,}")
        if checksum(file) != sha256:
            raise Damaged(f"{path} is damaged: {name} has another checksum than when it was written")


Check = Callable[[Path, Files], None]
"""Does what :func:`check_files` does."""


def newest_intact(folder: Path, say: Callable[[str], None], check: Check = check_files) -> tuple[Path, Progress] | None:
    """Newest checkpoint whose files match their checksums; None if there is no checkpoint at all.

    Args:
        folder: of a run's checkpoints.
        say: receives a message for each checkpoint that is skipped.
        check: the files of a checkpoint.

    Raises:
        ValueError: all are damaged, or one has another format.
    """
    found = list_checkpoints(folder)
    damaged = []
    for path in reversed(found):
        try:
            return path, _verified(path, check)
        except Damaged as error:
            damaged.append(str(error))
            if path != found[0]:
                say(f"{error}; taking the checkpoint before it")
    if damaged:
        raise ValueError(f"no checkpoint of {folder} can be used: {'; '.join(damaged)}")
    return None


def best_intact(
    folder: Path, metric: str, say: Callable[[str], None], check: Check = check_files
) -> tuple[Path, Progress] | None:
    """The checkpoint after the best epoch of the newest intact one's run; the newest itself before the first epoch has
    ended, and where the best one is damaged. Otherwise as :func:`newest_intact`."""
    newest = newest_intact(folder, say, check)
    best = best_epoch(newest[1].epochs, metric) if newest else None
    if newest is None or best is None or best["step"] == newest[1].step:
        return newest
    path = folder / checkpoint_name(best["step"])
    try:
        return path, _verified(path, check)
    except Damaged as error:
        say(f"{error}; taking {newest[0]} instead of the checkpoint of the best epoch")
        return newest


def step_intact(folder: Path, step: int, check: Check = check_files) -> tuple[Path, Progress]:
    """The checkpoint of a step. Raises ValueError if there is none, naming those that there are, or it is damaged."""
    path = folder / checkpoint_name(step)
    if not path.is_dir():
        steps = ", ".join(str(int(each.name.removeprefix(_PREFIX))) for each in list_checkpoints(folder))
        raise ValueError(f"{folder} has no checkpoint of step {step}; it has those of steps {steps or 'none'}")
    return path, _verified(path, check)


def _verified(path: Path, check: Check) -> Progress:
    """Checks a checkpoint's manifest and files and returns its progress; raises Damaged."""
    manifest = _manifest(path)
    check(path, manifest["files"])
    return Progress(**manifest["progress"])


def _manifest(path: Path) -> dict[str, Any]:
    """Loads a checkpoint's manifest; raises Damaged, or ValueError for another format."""
    try:
        manifest = dict(json.loads((path / MANIFEST).read_text(encoding="utf-8")))
        intact = manifest.pop("sha256") == _own_checksum(manifest)
    except (FileNotFoundError, KeyError):
        raise Damaged(
            f"{path} is damaged, or of a cowrec before format {FORMAT}: {MANIFEST} or its checksum is missing"
        ) from None
    except (ValueError, TypeError) as error:
        raise Damaged(f"{path} is damaged: {MANIFEST} cannot be read ({error})") from None
    if not intact:
        raise Damaged(f"{path} is damaged: {MANIFEST} has another checksum than when it was written")
    if manifest["format"] != FORMAT:
        raise ValueError(
            f"{path} is of format {manifest['format']!r}, this cowrec reads {FORMAT}; use the version that wrote it"
        )
    return manifest


def _own_checksum(manifest: dict[str, Any]) -> str:
    """SHA-256 of a manifest's other entries; of their values, whatever spaces the file has."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _prune(folder: Path, keep: CheckpointConfig) -> None:
    """Removes all checkpoints but the newest ones and the one with the best result."""
    found = list_checkpoints(folder)
    kept = set(found[-keep.keep_last :])
    if keep.keep_best != "none":
        kept |= set(_best(found, keep.keep_best))
    for path in found:
        if path not in kept:
            shutil.rmtree(path)


def _best(found: list[Path], metric: str) -> list[Path]:
    """Checkpoint after the epoch with the best result so far, if it still exists."""
    results: dict[Path, dict[str, Any]] = {}
    for path in found:
        try:
            progress = Progress(**_manifest(path)["progress"])
        except ValueError:
            continue
        if progress.epochs and progress.epoch_step == 0:
            results[path] = progress.epochs[-1]
    best = best_epoch(list(results.values()), metric)
    return [path for path, result in results.items() if result is best]
