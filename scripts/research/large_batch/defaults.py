"""What the defaults of `cowrec train` reach on untuned data, beside plain PyTorch and tuned values.

    python scripts/research/large_batch/defaults.py --data DATA/criteo_80k,DATA/ml1m --output results/HARDWARE/defaults.jsonl

Each line is a run of three epochs: AUC and logloss of the test split after each; of the defaults, which depend on the
number of epochs, three runs. All train on nine tenths of the training split; the last tenth chooses the tuned values,
for each number of epochs by itself. A run that has a line is not repeated. `--table` prints the file as a table.

    python scripts/research/large_batch/defaults.py --rates 2e-3,1e-3,5e-4,1.25e-4 --decays none,linear --sizes 8192,65536 \
        --epochs 2 --data DATA/days_4m,... --output results/HARDWARE/defaults_rates.jsonl

compares the defaults, for runs of so many epochs, with values of `embedding_lr` and `lr_decay`, and with the peers:
LightGBM with its defaults (`pip install lightgbm`; ids are categories) and, up to a million samples, logistic
regression of one-hot ids and numbers; both without fields of several ids.
"""

import argparse
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from sklearn.compose import make_column_transformer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder
from torch import Tensor, nn

from cowrec.data_pipeline import Batch, Reader, Schema
from cowrec.trainer.config.run import RunConfig, config_from, with_defaults
from cowrec.trainer.runtime.environment import environment
from cowrec.trainer.runtime.processes import process_group
from cowrec.trainer.sharded_model.run_plan import LrSchedule, RunPlan, Scaled
from cowrec.trainer.training.evaluation import predicted_samples
from cowrec.trainer.training.state import TrainState
from cowrec.trainer.training.trainer import Readers

EPOCHS, HELD_OUT = 3, 0.1
EARLIER = {"embedding_lr": 1e-4, "dense_lr": 8e-4, "l2": 1e-5, "warmup_epochs": 1.0}
"""The defaults before: those of the CowClip paper."""
GRID = {"embedding_lr": (1e-3, 2e-3, 4e-3), "dense_lr": (5e-4, 1e-3, 2e-3), "l2": (1e-5, 1e-4, 5e-4)}
CPU = torch.device("cpu")


class PlainDeepFM(nn.Module):
    """DeepFM of the default sizes in plain PyTorch; all weights Glorot-uniform.

    Args:
        schema: of the data.
    """

    def __init__(self, schema: Schema, dim: int = 10, hidden: tuple[int, ...] = (400, 400, 400)) -> None:
        super().__init__()
        self._fields = [field.name for field in schema.sparse]
        self._embeddings, self._wide = (
            nn.ModuleList(
                nn.EmbeddingBag(each.num_embeddings, width, mode=each.pooling, include_last_offset=True)
                for each in schema.sparse
            )
            for width in (dim, 1)
        )
        widths = [len(self._fields) * dim + len(schema.dense), *hidden]
        layers = [layer for sizes in itertools.pairwise(widths) for layer in (nn.Linear(*sizes), nn.ReLU())]
        self._mlp = nn.Sequential(*layers, nn.Linear(widths[-1], 1))
        self._linear = nn.Linear(len(schema.dense), 1) if schema.dense else None
        for name, each in self.named_parameters():
            nn.init.zeros_(each) if name.endswith("bias") else nn.init.xavier_uniform_(each)

    def forward(self, batch: Batch) -> Tensor:
        """Logits [B]."""
        jagged = batch.sparse.to_dict()
        ids = [(jagged[name].values(), jagged[name].offsets()) for name in self._fields]
        rows = torch.stack([table(*each) for table, each in zip(self._embeddings, ids, strict=True)], 1)
        logits = torch.stack([table(*each) for table, each in zip(self._wide, ids, strict=True)]).sum(0)
        logits = logits + self._mlp(torch.cat([rows.flatten(1), batch.dense], 1))
        if self._linear:
            logits = logits + self._linear(batch.dense)
        output: Tensor = logits.squeeze(1) + 0.5 * (rows.sum(1).square() - rows.square().sum(1)).sum(1)
        return output


def readers(data: Path, batch_size: int, seed: int) -> Readers:
    """The training samples but the last tenth, shuffled; the last tenth; and the test split."""
    rows = Schema.load(data).split("train").rows
    border = rows - round(rows * HELD_OUT)
    train = Reader(data, "train", rows=range(border), batch_size=batch_size, shuffle=True, seed=seed)
    held_out = Reader(data, "train", rows=range(border, rows), batch_size=16384)
    return Readers(train, held_out, Reader(data, "test", batch_size=16384))


def measures(logits: Tensor, label: Tensor) -> dict[str, float]:
    """AUC and logloss."""
    return {"auc": float(roc_auc_score(label, logits)), "logloss": float(log_loss(label, logits.double().sigmoid()))}


def train_plain(data: Path, batch_size: int, seed: int) -> dict[str, list[Any]]:
    """Trains DeepFM in plain PyTorch with Adam."""
    read = readers(data, batch_size, seed)
    torch.manual_seed(seed)
    model = PlainDeepFM(read.train.schema)
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)

    def measured(reader: Reader) -> dict[str, float]:
        with torch.no_grad():
            pairs = [(model(batch), batch.label) for batch in reader.epoch(0)]
        return measures(*(torch.cat(each) for each in zip(*pairs, strict=True)))

    found: dict[str, list[Any]] = {"validation": [], "test": []}
    for epoch in range(EPOCHS):
        for batch in read.train.epoch(epoch):
            adam.zero_grad()
            F.binary_cross_entropy_with_logits(model(batch), batch.label).backward()
            adam.step()
        for name in found:
            found[name].append(measured(getattr(read, name)))
    return found


def train_cowrec(
    data: Path,
    batch_size: int,
    seed: int,
    optimizer: dict[str, Any],
    epochs: int = EPOCHS,
    hidden: list[int] | None = None,
) -> dict[str, list[Any]]:
    """Trains as `cowrec train` does, with an empty TOML but for the given values."""
    config = config_of(data, batch_size, seed, optimizer, epochs, hidden)
    read = readers(data, config.train.batch_size, seed)
    found: dict[str, list[Any]] = {"validation": [], "test": []}
    with process_group("cpu") as process:
        schedule = LrSchedule.of_epochs(config.optimizer, len(read.train), epochs * len(read.train))
        state = TrainState(RunPlan.of(config, read.train.schema, process, schedule=schedule))
        for epoch in range(epochs):
            batches = map(state.ids.training, read.train.epoch(epoch))
            for _ in range(len(read.train)):
                state.step(batches)
            for name in found:
                samples = predicted_samples(state, getattr(read, name))
                found[name].append(measures(samples.logits, samples.label))
    return found


def train_defaults(data: Path, batch_size: int, seed: int) -> dict[str, list[Any]]:
    """The last epoch of a run of one epoch, of two and of three: L2 depends on their number."""
    each = [train_cowrec(data, batch_size, seed, {}, epochs + 1) for epochs in range(EPOCHS)]
    return {name: [run[name][-1] for run in each] for name in each[0]}


def train_peer(data: Path, name: str) -> dict[str, list[Any]]:
    """LightGBM or logistic regression, on the samples that the networks train on."""
    schema = Schema.load(data)
    ids = schema.singles
    parts = {split: pq.read_table(data / split) for split in ("train", "test")}
    rows = len(parts["train"])
    border = rows - round(rows * HELD_OUT)
    parts |= {"train": parts["train"][:border], "validation": parts["train"][border:]}
    label = {split: part["label"].to_numpy() for split, part in parts.items()}

    names = [*(field.name for field in schema.dense), *ids]
    x = {
        split: np.column_stack([part[each].to_numpy() for each in names]).astype(np.float32)
        for split, part in parts.items()
    }
    categories = list(range(len(schema.dense), len(names)))
    if name == "LightGBM":
        lightgbm = import_module("lightgbm")
        model = lightgbm.LGBMClassifier(n_jobs=1, verbosity=-1).fit(
            x["train"], label["train"], categorical_feature=categories
        )
    else:
        one_hot = (OneHotEncoder(handle_unknown="ignore"), categories)
        encoder = make_column_transformer(one_hot, remainder="passthrough", sparse_threshold=1.0)
        model = make_pipeline(encoder, LogisticRegression(C=0.1, max_iter=200)).fit(x["train"], label["train"])
    found: dict[str, list[Any]] = {}
    for split in ("validation", "test"):
        p = model.predict_proba(x[split])[:, 1]
        found[split] = [{"auc": float(roc_auc_score(label[split], p)), "logloss": float(log_loss(label[split], p))}]
    return found


def config_of(
    data: Path,
    batch_size: int,
    seed: int,
    optimizer: dict[str, Any],
    epochs: int = EPOCHS,
    hidden: list[int] | None = None,
) -> RunConfig:
    """The defaults, but for the seed, the given values and the mean; a batch size of 0 is the default."""
    train = {"batch_size": batch_size, "seed": seed, "device": "cpu", "epochs": epochs, "average": False}
    model = {"model": {"hidden": hidden}} if hidden else {}
    config = config_from({"train": train, "optimizer": optimizer, **model})
    return with_defaults(config, Schema.load(data).split("train").rows)


def runs(seeds: int, sizes: list[int]) -> Iterator[tuple[str, int, int, dict[str, Any] | None]]:
    """The runs of a data set: name, batch size (0: the default), seed and values of [optimizer]."""
    for seed in range(seeds):
        yield "defaults", 0, seed, {}
        for size in sizes:
            yield "plain PyTorch", size, seed, None
            yield "defaults", size, seed, {}
            yield "earlier defaults", size, seed, EARLIER
    for values in sorted(itertools.product(*GRID.values()), key=lambda values: abs(values[1] - 1e-3)):
        yield "grid", 1024, 0, dict(zip(GRID, values, strict=True))


def result(data: Path, name: str, size: int, seed: int, optimizer: dict[str, Any] | None) -> dict[str, Any]:
    """Runs it; returns the measures after each epoch, and the values that the batch size leads to."""
    if optimizer is None:
        return train_plain(data, size, seed)
    config = config_of(data, size, seed, optimizer)
    derived = {"batch_size": config.train.batch_size, **dataclasses.asdict(Scaled.of(config).hyperparameters)}
    found = train_cowrec(data, size, seed, optimizer) if optimizer else train_defaults(data, size, seed)
    return found | {"derived": derived}


def compare_rates(given: argparse.Namespace, data: Path, sizes: list[int]) -> None:
    """Adds the lines of the defaults, of the rates and of the peers, all of seed 0."""
    epochs, hidden = given.epochs, [int(each) for each in given.hidden.split(",") if each]
    rates = [float(each) for each in given.rates.split(",")]
    values: list[dict[str, Any]] = [{}]
    values += [{"embedding_lr": lr, "lr_decay": decay} for decay in given.decays.split(",") for lr in rates]
    for size, optimizer in itertools.product(sizes, values):
        key = {"run": "rates" if optimizer else "defaults", "batch_size": size, "seed": 0, "optimizer": optimizer}
        key = {"data": data.name, **key, "epochs": epochs, "hidden": hidden}

        def trained(size: int = size, optimizer: dict[str, Any] = optimizer) -> dict[str, Any]:
            config = config_of(data, size, 0, optimizer, epochs, hidden)
            derived = {"batch_size": config.train.batch_size, **dataclasses.asdict(Scaled.of(config).hyperparameters)}
            derived["lr_decay"] = config.optimizer.lr_decay
            return {**train_cowrec(data, size, 0, optimizer, epochs, hidden), "derived": derived}

        add_line(given.output, key, trained)
    few = Schema.load(data).split("train").rows <= 1_000_000
    for name in ("LightGBM", "logistic regression")[: 1 + few]:
        add_line(given.output, {"data": data.name, "run": name}, partial(train_peer, data, name))


def tuned(lines: list[dict[str, Any]], epoch: int) -> dict[str, Any]:
    """The values of [optimizer] that the held-out samples choose after an epoch, among the grid's runs of seed 0."""
    grid = [line for line in lines if line["run"] == "grid" and line["seed"] == 0]
    best: dict[str, Any] = max(grid, key=lambda line: line["validation"][epoch]["auc"])["optimizer"]
    return best


def table(lines: list[dict[str, Any]]) -> str:
    """AUC in percent after one, two and three epochs: means over seeds, and the grid's best by the held-out samples."""
    rows = [("data", "run", "batch", *(f"{epoch + 1}" for epoch in range(EPOCHS)))]
    keys = dict.fromkeys((line["data"], line["run"], line["batch_size"]) for line in lines)
    for key in keys:
        own = [line for line in lines if (line["data"], line["run"], line["batch_size"]) == key]
        aucs = []
        for epoch in range(EPOCHS):
            chosen = own
            if key[1] == "grid":
                values = tuned(own, epoch)
                chosen = [line for line in own if line["optimizer"] == values]
            aucs.append(f"{100 * mean(line['test'][epoch]['auc'] for line in chosen):.2f}")
        rows.append((key[0], "tuned" if key[1] == "grid" else key[1], str(key[2]), *aucs))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def rates_table(lines: list[dict[str, Any]]) -> str:
    """AUC in percent and logloss of the last epoch of each line of a file of --rates."""
    rows = [("data", "layers", "batch", "epochs", "run", "embedding_lr", "lr_decay", "AUC", "logloss")]
    for line in lines:
        optimizer, last = line.get("optimizer", {}), line["test"][-1]
        shape = ["-".join(map(str, line.get("hidden", []))), line.get("batch_size", ""), line.get("epochs", "")]
        values = [optimizer.get(key, "") for key in ("embedding_lr", "lr_decay")]
        measured = f"{100 * last['auc']:.2f}", f"{last['logloss']:.4f}"
        rows.append((line["data"], *map(str, shape), line["run"], *map(str, values), *measured))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="", help="prepared data sets, separated by commas")
    parser.add_argument("--output", "-o", type=Path, required=True, help="JSON lines to write or continue")
    parser.add_argument("--seeds", type=int, default=2, help="seeds of each run; of the grid those of the tuned values")
    parser.add_argument("--sizes", default="256,1024,4096", help="batch sizes beside the default")
    parser.add_argument(
        "--rates", default="", help="values of embedding_lr; compares these and peers with the defaults"
    )
    parser.add_argument("--decays", default="none,linear", help="values of lr_decay for each of them")
    parser.add_argument("--epochs", type=int, default=2, help="of the runs with --rates")
    parser.add_argument(
        "--hidden", default="", help="layers of the networks with --rates, if not those of the defaults"
    )
    parser.add_argument("--table", action="store_true", help="print the file as a table")
    arguments = parser.parse_args()
    if arguments.table:
        lines = read(arguments.output)
        print(rates_table(lines) if any("epochs" in line for line in lines) else table(lines))
        return
    sizes = [int(each) for each in arguments.sizes.split(",") if each]
    for data in map(Path, arguments.data.split(",")):
        if arguments.rates:
            compare_rates(arguments, data, sizes)
            continue
        for each in runs(arguments.seeds, sizes):
            add(arguments.output, data, *each)
        lines = [line for line in read(arguments.output) if line["data"] == data.name]
        for seed, epoch in itertools.product(range(1, arguments.seeds), range(EPOCHS)):
            add(arguments.output, data, "grid", 1024, seed, tuned(lines, epoch))


def read(output: Path) -> list[dict[str, Any]]:
    """The lines of the file, which need not exist yet."""
    return [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []


def add(output: Path, data: Path, name: str, size: int, seed: int, optimizer: dict[str, Any] | None) -> None:
    """Adds the line of a run, unless the file has it."""
    key = {"data": data.name, "run": name, "batch_size": size, "seed": seed, "optimizer": optimizer}
    add_line(output, key, partial(result, data, name, size, seed, optimizer))


def add_line(output: Path, key: dict[str, Any], run: Callable[[], dict[str, Any]]) -> None:
    """Adds a line with the key and what the run returns, unless the file has one with the key."""
    if any(key.items() <= line.items() for line in read(output)):
        return
    found = run()
    with output.open("a") as file:
        file.write(json.dumps(key | found | environment(CPU)) + "\n")
    print(*key.values(), *(f"{100 * each['auc']:.2f}" for each in found["test"]), flush=True)


if __name__ == "__main__":
    main()
