"""The folder of a run: resolved configuration, metrics, TensorBoard events, checkpoints, data description, report.

config.toml  metrics.jsonl  tensorboard/  checkpoints/step_N/  schema.json  vocabulary/  report.json  code.json  code/
mlflow_run_id.txt  wandb_run_id.txt; of `fit` also data.parquet  data.toml  data/
"""

import filecmp
import json
import math
import shutil
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch.distributed as dist

from cowrec.data_pipeline import Schema
from cowrec.data_pipeline.dataset.schema import SCHEMA_FILE, vocabulary_file
from cowrec.data_pipeline.preparation.config import prepared_with
from cowrec.errors import UserError
from cowrec.files import checksum, replace_file, replacing
from cowrec.models.own_code import file_of, search_also

from ..config.run import RunConfig, first_difference, load_config, save_config, to_plain
from ..runtime.environment import launched_rank
from ..runtime.processes import Process, from_first, on_first

CONFIG, REPORT, CHECKPOINTS = "config.toml", "report.json", "checkpoints"
METRICS, BOARD, VOCABULARY, JOURNAL = "metrics.jsonl", "tensorboard", "vocabulary", "journal"
MALFORMED = "malformed.jsonl"
FITTED = "data"
"""Name of a table's file, schema file and data set that `fit` makes there before the run begins."""
_MAY_CHANGE = {
    "data": "dir resident",
    "train": "epochs device eval_batch_size log_every log_seconds timeout_seconds cuda_graph trackers",
    "evaluate": "by_id_counts",
    "checkpoint": "every_steps keep_last keep_best",
    "online": "snapshot_seconds report_seconds metrics_host metrics_port metrics_file_bytes damaged_files on_nonfinite"
    " keep_full_versions max_malformed_share on_malformed malformed_file_bytes file_grace_seconds on_lost_samples",
    "sharding": "plan tables",
}
"""Settings that may differ in a resumed run: they change neither the steps taken nor their meaning."""


def require_shared(path: Path, process: Process) -> None:
    """Raises UserError on all processes if those of several hosts do not share the run folder.

    Each writes a file there, and the first one looks for all of them.
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
    except UserError:
        own.unlink(missing_ok=True)
        with suppress(OSError):  # something else is in the folder
            path.rmdir()
        raise
    own.unlink()


def require_unused(path: Path) -> None:
    if not _is_used(path):
        return
    is_complete, has_stream = (path / REPORT).is_file(), (path / JOURNAL).exists()
    if not (path / CONFIG).is_file():
        found = "is not empty, and not that of a run"
    elif is_complete and has_stream:
        found = "has a run whose stream ended; add --resume to follow it further"
    elif is_complete and load_config(path / CONFIG).optimizer.rates_follow_epochs:
        found = "has a complete run, whose rates have decayed; begin another with train.warm_start to train it further"
    elif is_complete:
        found = "has a complete run; add --resume and raise train.epochs to train it further"
    elif has_stream:
        found = "has a run that was stopped; add --resume to continue it"
    else:
        found = f"has a run that was stopped, which cowrec train {path / CONFIG} --run-dir {path} --resume continues"
    found += " (in Python by train(..., resume=True))" if "--resume" in found else ""
    raise UserError(f"run folder {path} {found}; or choose another with --run-dir, or remove it")


def require_own(path: Path, config: RunConfig) -> None:
    """Raises UserError if a folder holds anything other than a run of this configuration."""
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
    """Raises UserError unless a data set is the one of a run, or a copy of it; of a stream, one that decodes alike."""
    run, data = Schema.load(run_dir), Schema.load(data_dir)
    require_same_ids(run_dir, run, data_dir, data, restored=True)
    if (run_dir / JOURNAL).exists():  # it reads no samples of the data set, but decodes with its fields
        different = _difference_of_settings(*({"layout": schema.settings.get("layout")} for schema in (run, data)))
    else:
        different = difference_of_samples(run, data)
    if different:
        raise UserError(
            f"{data_dir} is not the data set of {run_dir}: {different}; resume with that one, or start another run,"
            " with train.warm_start to begin with this one's weights"
        )


def difference_of_samples(one: Schema, other: Schema) -> str:
    """Describes a difference of the samples of two data sets, as far as their schemas tell; "" without any."""
    if (one.dense, one.sparse, one.labels) != (other.dense, other.sparse, other.labels):
        return "its fields, their sizes or scales, or its labels differ"
    trained = [schema.splits["train"].rows if "train" in schema.splits else 0 for schema in (one, other)]
    if trained[0] != trained[1]:
        return f"it has {trained[1]:,} training samples instead of {trained[0]:,}"
    if one.splits != other.splits:
        return "its splits differ"
    if [(file.bytes, file.rows) for file in one.sources] != [(file.bytes, file.rows) for file in other.sources]:
        return "it was prepared from other files"
    return _difference_of_settings(one.settings, other.settings)


def _difference_of_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Names the sections in which the settings of two data sets differ so that samples may change; "" without any."""
    idle = ("shard_rows", "on_bad_row", "max_bad_rows", "keep")
    first, second = (_without({**given, "prepare": prepared_with(given)}, idle) for given in (one, other))
    different = [name for name in first.keys() | second.keys() if first.get(name) != second.get(name)]
    return f"it was prepared with other settings ({', '.join(sorted(different))})" if different else ""


def require_same_ids(run_dir: Path, run: Schema, data_dir: Path, data: Schema, *, restored: bool = False) -> None:
    """Raises UserError if the data were prepared with other ids or dense scales than the run's.

    If ``restored``, a vocabulary that is missing or damaged in the run's folder is copied there again.
    """
    different = None
    hashed = any(field.encoding in ("hash", "raw") for field in run.sparse)
    fields = ({"fields": (schema.settings.get("layout") or {}).get("fields")} for schema in (run, data))
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
    """Returns the settings that determine the meaning of synthetic ids: all but the sizes of the splits."""
    if schema.name != "synthetic":
        return None
    return _without(schema.settings, ("rows", "test_rows", "shard_rows"))


def _without(settings: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {
        key: _without(value, keys) if isinstance(value, Mapping) else value
        for key, value in settings.items()
        if key not in keys
    }


def _same_vocabulary(run: Path, data: Path, *, restored: bool) -> bool:
    """Compares ids and their order; versions of the Parquet library write the same ids as other bytes."""
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
    return path.exists() and any(file.suffix != ".partial" and file.stem != FITTED for file in path.iterdir())


def create_run_dir(path: Path, config: RunConfig, derived: Mapping[str, Any]) -> None:
    """Writes a run's configuration and everything that is needed to use the run without its training data.

    Files of an interrupted start and the configuration of a resumed run are replaced. The derived values are comments
    above the configuration. Raises UserError if the folder has a run on another data set.
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
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


RECORD = "code.json"
"""File in the folder of a run that lists the files of the user's own network and loss with their checksums."""


@dataclass(frozen=True)
class OwnCode:
    """A network or loss of the user's own.

    Attributes:
        key: key of the configuration that names it.
        name: "module:name".
        folder: folder in which Python found the module.
        files: SHA-256 of the imported files of the module's package, or of those beside it, by path in the folder.
    """

    key: str
    name: str
    folder: str
    files: dict[str, str]


def own_code(key: str, name: str) -> OwnCode:
    folder, top = _folder(name), _folder(name) / name.partition(":")[0].partition(".")[0]
    modules = [module for name, module in list(sys.modules.items()) if name not in ("__main__", "__mp_main__")]
    files = {file for module in modules if (file := file_of(module)) and file.is_file()}
    own = sorted(file for file in files if (top in file.parents if top.is_dir() else file.parent == folder))
    return OwnCode(key, name, str(folder), {str(file.relative_to(folder)): checksum(file) for file in own})


def _folder(name: str) -> Path:
    """Returns the folder in which Python found the imported module of "module:name"."""
    module = name.partition(":")[0]
    file = file_of(sys.modules[module])
    return Path.cwd() if file is None else file.parents[module.count(".") + (file.name == "__init__.py")]


def save_code(run_dir: Path, config: RunConfig) -> None:
    """Writes the record of a run's own code; nothing without such code."""
    record = [asdict(own_code(key, name)) for key, name in config.own_code.items()]
    if record:
        replace_file(run_dir / RECORD, (json.dumps(record, indent=1) + "\n").encode())


def load_code(run_dir: Path) -> list[OwnCode]:
    """Reads the record of a run's own code, empty without such code, and lets Python find it where it was."""
    file = run_dir / RECORD
    record = [OwnCode(**code) for code in json.loads(file.read_text(encoding="utf-8"))] if file.is_file() else []
    search_also(*(Path(code.folder) for code in record))
    return record


def changes(record: Iterable[OwnCode], where: Path) -> list[str]:
    """Names each file of recorded code, imported now, that differs from its record in the folder ``where`` of a run."""
    files = {_folder(code.name) / name: (code, name) for code in record for name in code.files}
    return [
        f'{file} is not as {where} was trained with it ({code.key} = "{code.name}")'
        for file, (code, name) in files.items()
        if not file.is_file() or checksum(file) != code.files[name]
    ]


def warn_if_changed(record: Iterable[OwnCode], where: Path) -> None:
    """Warns once of each change of recorded code; see :func:`changes`."""
    for change in changes(record, where) if launched_rank() == 0 else ():
        print(f"warning: {change}", file=sys.stderr)
