"""The folder of a run: resolved configuration, metrics, TensorBoard events, checkpoints, data description, report.

config.toml  metrics.jsonl  tensorboard/  checkpoints/step_N/  schema.json  vocabulary/  report.json  code.json  code/
mlflow_run_id.txt  wandb_run_id.txt; of `fit` also data.parquet  data.toml  data/
"""

import filecmp
import json
import math
import shutil
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch.distributed as dist

from cowrec.data_pipeline import Schema
from cowrec.data_pipeline.dataset.schema import SCHEMA_FILE, vocabulary_file
from cowrec.data_pipeline.preparation.config import prepared_with
from cowrec.errors import UserError
from cowrec.files import replace_file, replacing

from ..config.run import RunConfig, first_difference, load_config, save_config, to_plain
from ..runtime.processes import Process, from_first, on_first
from .provenance import load_code, save_code, warn_if_changed

CONFIG, REPORT, CHECKPOINTS = "config.toml", "report.json", "checkpoints"
METRICS, BOARD, VOCABULARY, JOURNAL = "metrics.jsonl", "tensorboard", "vocabulary", "journal"
MALFORMED = "malformed.jsonl"
"""Samples of a stream that were malformed."""
FITTED = "data"
"""Name of a table's file, schema file and data set that `fit` makes there before the run begins."""


_MAY_CHANGE = {
    "data": "dir resident",
    "train": "epochs device eval_batch_size log_every log_seconds timeout_seconds cuda_graph trackers",
    "evaluate": "by_id_counts",
    "checkpoint": "every_steps keep_last keep_best",
    "online": "snapshot_seconds report_seconds metrics_host metrics_port metrics_file_bytes damaged_files on_nonfinite"
    " keep_full_versions max_malformed_share on_malformed malformed_file_bytes",
    "sharding": "plan tables",
}
"""Settings that may differ in a resumed run: they change neither the steps taken nor their meaning."""


def require_shared(path: Path, process: Process) -> None:
    """Raises ValueError on all processes if those of several hosts do not have one run folder.

    Each writes a file there, which no cache of a network file system hides, and the first one looks for all of them.
    """
    if process.local_world_size == process.world_size:
        return
    token = from_first(process, lambda: uuid.uuid4().hex)
    files = [path / f"{token}_{rank}.partial" for rank in range(process.world_size)]
    own = files[process.rank]
    with suppress(OSError):
        path.mkdir(parents=True, exist_ok=True)
        own.touch()
    dist.barrier()

    def check() -> None:
        if lacking := [str(rank) for rank, file in enumerate(files) if not file.exists()]:
            raise UserError(
                f"run folder {path} is not shared: files of the processes {', '.join(lacking)} are not there; choose"
                " with --run-dir a folder that all machines share, or for cowrec train a URI such as s3://BUCKET/RUN"
            )

    try:
        on_first(process, check)
    except ValueError:
        own.unlink(missing_ok=True)
        with suppress(OSError):  # something else is in it
            path.rmdir()
        raise
    own.unlink()


def require_unused(path: Path) -> None:
    """Raises ValueError if a run's folder is not empty."""
    if _is_used(path):
        if not (path / CONFIG).is_file():
            found = "is not empty, and not that of a run"
        elif (path / REPORT).is_file() and (path / JOURNAL).exists():
            found = "has a run whose stream ended; add --resume to follow it further"
        elif (path / REPORT).is_file() and load_config(path / CONFIG).optimizer.rates_follow_epochs:
            found = (
                "has a complete run, whose rates have decayed; begin another with train.warm_start to train it further"
            )
        elif (path / REPORT).is_file():
            found = "has a complete run; add --resume and raise train.epochs to train it further"
        elif (path / JOURNAL).exists():
            found = "has a run that was stopped; add --resume to continue it"
        else:
            found = (
                f"has a run that was stopped, which cowrec train {path / CONFIG} --run-dir {path} --resume continues"
            )
        found += " (in Python by train(..., resume=True))" if "--resume" in found else ""
        raise UserError(f"run folder {path} {found}; or choose another with --run-dir, or remove it")


def require_own(path: Path, config: RunConfig) -> None:
    """Raises ValueError if a folder holds anything other than a run of this configuration."""
    if not _is_used(path):
        return
    if not (path / CONFIG).is_file():
        raise UserError(f"{path} is not a run: it has no {CONFIG}; choose another with --run-dir")
    saved, given = to_plain(load_config(path / CONFIG)), to_plain(config)
    for section, keys in _MAY_CHANGE.items():
        for key in keys.split():
            if key == "keep_best" and config.train.patience:
                continue  # it chooses the epoch that the run reports
            if key == "epochs" and config.optimizer.rates_follow_epochs:
                continue  # the learning rates depend on it
            saved.get(section, {}).pop(key, None)
            given.get(section, {}).pop(key, None)
    different = first_difference(saved, given)
    if different:
        decays = config.optimizer.rates_follow_epochs and "train.epochs" in different
        remedy = ' with optimizer.lr_decay = "none", which more epochs can continue' if decays else ""
        raise UserError(
            f"{path} is of another configuration: {different}; resume with the run's own {path / CONFIG}, or start"
            f" another run{remedy}"
        )


def _require_same_data(run_dir: Path, data_dir: Path) -> None:
    """Raises ValueError unless a data set is the one of a run, or a copy of it; of a stream, one that decodes alike."""
    run, data = Schema.load(run_dir), Schema.load(data_dir)
    require_same_ids(run_dir, run, data_dir, data, restored=True)
    if (run_dir / JOURNAL).exists():  # it reads no samples of the data set, but decodes with its fields
        different = _difference_of_settings(*({"layout": each.settings.get("layout")} for each in (run, data)))
    else:
        different = difference_of_samples(run, data)
    if different:
        raise UserError(
            f"{data_dir} is not the data set of {run_dir}: {different}; resume with that one, or start another run,"
            " with train.warm_start to begin with this one's weights"
        )


def difference_of_samples(one: Schema, other: Schema) -> str:
    """In what the samples of two data sets differ, as far as their schemas tell; "" if in nothing."""
    if (one.dense, one.sparse, one.labels) != (other.dense, other.sparse, other.labels):
        return "its fields, their sizes or scales, or its labels differ"
    trained = [schema.splits["train"].rows if "train" in schema.splits else 0 for schema in (one, other)]
    if trained[0] != trained[1]:
        return f"it has {trained[1]:,} training samples instead of {trained[0]:,}"
    if one.splits != other.splits:
        return "its splits differ"
    if [(each.bytes, each.rows) for each in one.sources] != [(each.bytes, each.rows) for each in other.sources]:
        return "it was prepared from other files"
    return _difference_of_settings(one.settings, other.settings)


def _difference_of_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """In which sections the settings of two data sets differ, other than in what changes no sample; "" if in none."""
    idle = ("shard_rows", "on_bad_row", "max_bad_rows", "keep")
    first, second = (_without({**each, "prepare": prepared_with(each)}, idle) for each in (one, other))
    different = [name for name in first.keys() | second.keys() if first.get(name) != second.get(name)]
    return f"it was prepared with other settings ({', '.join(sorted(different))})" if different else ""


def require_same_ids(run_dir: Path, run: Schema, data_dir: Path, data: Schema, *, restored: bool = False) -> None:
    """Raises ValueError if the data were prepared with other ids or dense scales than the run's.

    Args:
        restored: a vocabulary that is missing or damaged in the run's folder is no error: it is copied there again.
    """
    different = None
    hashed = any(field.encoding in ("hash", "raw") for field in run.sparse)
    fields = ({"fields": (each.settings.get("layout") or {}).get("fields")} for each in (run, data))
    if (run.dense, run.sparse) != (data.dense, data.sparse):
        different = "its fields, their sizes or scales differ"
    elif run.labels != data.labels:
        different = f"its labels are {', '.join(data.labels)} instead of {', '.join(run.labels)}"
    elif _planted(run) != _planted(data):
        different = "it is synthetic, of another seed or shape"
    elif hashed and (other := _difference_of_settings(*fields)):
        different = other
    else:
        for field in run.sparse:
            files = [vocabulary_file(folder, field.vocabulary) for folder in (run_dir, data_dir)]
            if field.encoding == "vocabulary" and not _same_vocabulary(*files, restored=restored):
                different = f"the ids of field {field.name!r} differ"
                break
    if different:
        raise UserError(
            f"{data_dir} was not prepared like the data of {run_dir}: {different}; prepare its raw files with --like"
            f" {run_dir}, or pass them to predict or evaluate with --input"
        )


def _planted(schema: Schema) -> dict[str, Any] | None:
    """Settings that determine the meaning of synthetic ids: all but the sizes of the splits."""
    if schema.name != "synthetic":
        return None
    return _without(schema.settings, ("rows", "test_rows", "shard_rows"))


def _without(settings: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Settings, and those of their sections, without some keys."""
    return {
        key: _without(value, keys) if isinstance(value, Mapping) else value
        for key, value in settings.items()
        if key not in keys
    }


def _same_vocabulary(run: Path, data: Path, *, restored: bool) -> bool:
    """True for the same ids in the same order; versions of the Parquet library write them differently."""
    if _same_bytes(run, data):
        return True
    ids = []
    for path in (data, run):
        try:
            ids.append(pq.read_table(path, columns=["value"]))
        except (OSError, pa.ArrowException):
            if restored and path == run:
                return True
            raise UserError(
                f"vocabulary file {path} is missing or damaged; prepare the data set again, or continue the run with"
                " --resume, which restores its own"
            ) from None
    return bool(ids[0].equals(ids[1]))


def _same_bytes(one: Path, other: Path) -> bool:
    return one.is_file() and other.is_file() and filecmp.cmp(one, other, shallow=False)


def _is_used(path: Path) -> bool:
    if path.exists() and not path.is_dir():
        raise UserError(f"run folder {path} is a file; choose another with --run-dir")
    return path.exists() and any(each.suffix != ".partial" and each.stem != FITTED for each in path.iterdir())


def create_run_dir(path: Path, config: RunConfig, derived: Mapping[str, Any]) -> None:
    """Writes a run's configuration and everything that is needed to use the run without its training data.

    Files of an interrupted start and the configuration of a resumed run are replaced.

    Args:
        derived: values derived from the configuration, written above it as comments.

    Raises:
        ValueError: the folder has a run on another data set; nothing is written.
    """
    data_dir = Path(config.data.dir)
    if begun := (path / SCHEMA_FILE).is_file():
        _require_same_data(path, data_dir)
    save_config(config, path / CONFIG, "\n".join(f"derived: {key} = {value}" for key, value in derived.items()))
    warn_if_changed(load_code(path), path)  # of a resumed run
    save_code(path, config)
    for file in sorted((data_dir / VOCABULARY).glob("*")):
        (path / VOCABULARY).mkdir(exist_ok=True)
        own = path / VOCABULARY / file.name
        if not _same_bytes(own, file):
            with file.open("rb") as source, replacing(own) as copy:
                shutil.copyfileobj(source, copy)
    if not begun:
        Schema.load(data_dir).save(path)  # last: the next start compares what is here with its data


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a file such as ``report.json``, and replaces an earlier one atomically."""
    replace_file(path, (to_json(value, indent=2) + "\n").encode())


def to_json(value: dict[str, Any], indent: int | None = None) -> str:
    """Formats JSON with null for numbers that are not finite, which JSON cannot express."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
