"""Small data sets and runs for the trainer's tests, also runs on several processes."""

import json
import os
import random
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from cowrec.data_pipeline import PrepareConfig, prepare
from process_groups import in_processes

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}

CONFIG = """
[data]
resident = "no"
window_rows = 64

[model]
name = "deepfm"
embedding_dim = 6
hidden = [8]

[train]
batch_size = 51
eval_batch_size = 20
epochs = 2
log_every = 2
device = "cpu"

[optimizer]
base_batch_size = 51
scaling = "cowclip"
embedding_lr = 1e-2
dense_lr = 1e-2
l2 = 1e-4

[clip]
rule = "cowclip"
r = 0.5
zeta = 1e-4
"""

OPTIMIZERS: dict[str, list[str]] = {
    "replay": [],
    "dense": ["optimizer.absent_rows=dense"],
    "lazy": ["optimizer.absent_rows=lazy"],
    "adagrad": ["optimizer.embedding=adagrad"],
    "rowwise_adagrad": ["optimizer.embedding=rowwise_adagrad"],
    "sgd": ["optimizer.embedding=sgd"],
    "fbgemm_cowclip": ["optimizer.embedding=fbgemm_cowclip", "clip.rule=none"],
}
"""Settings by which the tables are trained in each way."""

COLUMNS = {
    "price": 'kind = "numeric"',
    "city": 'kind = "categorical"',
    "tags": 'kind = "multi"\nseparator = "|"',
    "history": 'kind = "weighted"\nseparator = " "\nweight_separator = ":"',
}
UNWEIGHTED = ("price", "city", "tags")
TRAIN_ROWS, TEST_ROWS = 4 * 51 + 1, 2 * 20 + 1
"""Batches of 51 are uneven slices for two processes; the last batch of each split is one sample, none for the first."""


def config_file(folder: Path) -> Path:
    file = folder / "run.toml"
    file.write_text(CONFIG)
    return file


def raw_rows(rows: int, columns: Sequence[str] = tuple(COLUMNS), *, seed: int = 0, labelled: bool = True) -> str:
    """Text of a csv with a header. Cities carry most of the signal; bags have 0 to 4 ids, which may repeat."""
    rng = random.Random(seed)
    lines = [",".join([*(["click"] if labelled else []), *columns])]
    for _ in range(rows):
        city = rng.randrange(8)
        values = {
            "price": str(rng.randrange(100)),
            "city": f"city{city}",
            "tags": "|".join(f"t{rng.randrange(5)}" for _ in range(rng.randrange(5))),
            "history": " ".join(
                f"h{rng.randrange(9)}:{rng.choice(('1', '0.5', '2'))}" for _ in range(rng.randrange(4))
            ),
        }
        click = str(int(rng.random() < (city + 1) / 10))
        lines.append(",".join([*([click] if labelled else []), *(values[name] for name in columns)]))
    return "\n".join(lines) + "\n"


def make_data(folder: Path, columns: Sequence[str] = tuple(COLUMNS), *, test_rows: int = TEST_ROWS) -> Path:
    """Prepares a data set ``folder/data`` of TRAIN_ROWS training samples; its raw files are in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "raw.csv").write_text(raw_rows(TRAIN_ROWS + test_rows, columns))
    fields = "".join(f'[[fields]]\nname = "{name}"\n{COLUMNS[name]}\n' for name in columns)
    (folder / "columns.toml").write_text(f'delimiter = ","\nlabel = "click"\n{fields}')
    settings = PrepareConfig(split="order", test_rows=test_rows)
    prepare("tabular", [folder / "raw.csv"], folder / "data", settings, schema_file=folder / "columns.toml")
    return folder / "data"


def edit_column(shard: Path, column: str, where: int | slice, value: Any) -> None:
    """Writes values, or what a function makes of those that are there, into a shard of a data set."""
    table = pq.read_table(shard)
    values, index = table[column].to_numpy().copy(), table.column_names.index(column)
    values[where] = value(values[where]) if callable(value) else value
    pq.write_table(table.set_column(index, table.schema.field(index), [values]), shard)


def checkpoint(run_dir: Path) -> dict[str, Any]:
    """Loads a run's newest checkpoint as nested dictionaries of complete tensors."""
    newest = sorted((run_dir / "checkpoints").glob("step_*"))[-1]
    with tempfile.NamedTemporaryFile() as file:  # since workers share runs
        dcp_to_torch_save(newest, file.name)
        content: dict[str, Any] = torch.load(file.name)
    return content


def tensors(state: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Tensors in nested dictionaries, by path."""
    if isinstance(state, torch.Tensor):
        return {path: state}
    return {key: value for name, entry in state.items() for key, value in tensors(entry, f"{path}/{name}").items()}


def newest_progress(run_dir: Path) -> dict[str, Any]:
    """Progress that a run's newest checkpoint holds."""
    newest = sorted((run_dir / "checkpoints").glob("step_*"))[-1]
    progress: dict[str, Any] = json.loads((newest / "checkpoint.json").read_text())["progress"]
    return progress


def interrupted(run_dir: Path, at: int, copy: Path) -> Path:
    """Copies a run's folder as a kill after the checkpoint of step ``at`` would leave it.

    It has metrics of later steps, half a line, and an unfinished checkpoint.
    """
    shutil.copytree(run_dir, copy)
    (copy / "report.json").unlink()
    for path in (copy / "checkpoints").iterdir():
        if int(path.name.removeprefix("step_")) > at:
            shutil.rmtree(path)
    (copy / "checkpoints" / "step_000000099.partial").mkdir()
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tra')
    return copy


def train_case(case: dict[str, Any]) -> str:
    """Trains one case; returns "ok", or the message of its ValueError."""
    from cowrec.trainer.config.run import load_config
    from cowrec.trainer.training.trainer import train

    try:
        config = load_config(Path(case["config"]), case["set"])
        train(config, case["data"], case["run_dir"], resume=case.get("resume", False))
    except ValueError as error:
        return str(error)
    return "ok"


def free_port() -> int:
    """A port on which nobody listens; not one of those that the system gives to connections, which may take it soon."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("localhost", port))
            return port


def case_of(folder: Path, run_dir: Path | str, *settings: str, data: Path | None = None, **more: Any) -> dict[str, Any]:
    """A case of `train_case`: ``folder/run.toml`` with settings, by default on ``folder/data``."""
    paths = {"config": f"{folder}/run.toml", "data": str(data or folder / "data"), "run_dir": str(run_dir)}
    return {**paths, "set": [*settings], **more}


def train_in_processes(*cases: dict[str, Any], processes: int = 2) -> None:
    """Trains cases one after the other, in processes as torchrun would start them."""
    assert outcomes_in_processes(train_case, cases, processes) == [["ok"] * len(cases)] * processes


def outcomes_in_processes(
    run_case: Callable[[dict[str, Any]], str], cases: Sequence[dict[str, Any]], processes: int
) -> list[list[str]]:
    """Runs cases one after the other, in processes as torchrun would start them; returns each rank's outcomes."""
    with tempfile.TemporaryDirectory() as folder:
        in_processes(_run_cases, (run_case, cases, folder, processes, free_port()), processes)
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(processes)]


def _run_cases(
    rank: int, run_case: Callable, cases: Sequence[dict[str, Any]], folder: str, processes: int, port: int
) -> None:
    launched_as(rank, processes, port)
    outcomes = [run_case(case) for case in cases]
    Path(folder, str(rank)).write_text(json.dumps(outcomes))
    sys.stdout.flush()
    os._exit(0)  # see process_groups.process_group


def launched_as(rank: int, processes: int, port: int) -> None:
    """Sets what torchrun tells a process that it starts."""
    size = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    store = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), **size, **store}
