"""What becomes of absent rows over five epochs: the paper's L2 at every step, L2 in touched rows alone, and AdamAR.

    python -m scripts.research.large_batch.absent_rows --data DATA/bed --output results/HARDWARE/absent_rows.jsonl

Methods: "replay" and "lazy" are `optimizer.absent_rows`, with L2 of `value` / (training samples). "AdamAR" is lazy Adam
without L2, after whose step a touched row is multiplied by ``1 - value * I / (steps of an epoch)``, at least 0, where I
is the number of steps since the row was touched before (arXiv 2511.06374, whose learning rate and factor are in
``value``). All have the default settings at constant rates. Each line has the measures after an epoch, of the last
weights and of their mean (`train.average`). A run that has its lines is not repeated. `--table` prints the file,
`--plot FILE.png` draws it.
"""

import argparse
import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from cowrec.data_pipeline import Batch
from cowrec.trainer.runtime.processes import Process, process_group
from cowrec.trainer.sharded_model.build import local_shards
from cowrec.trainer.training.weight_average import STATES, averaged_weights

from .epochs import Bed, arguments_of_beds, numbers

EPOCHS = 5
METHODS = ("replay", "lazy", "AdamAR")
NAMES = {"criteo80k": "Criteo", "syn100k": "synthetic", "clicks": "quickstart"}


class MethodBed(Bed):
    """A run under one of the methods."""

    def __init__(self, data: Path, given: argparse.Namespace, method: str, value: float, process: Process) -> None:
        self.shrinks = value if method == "AdamAR" else 0.0
        absent = {"absent_rows": "replay" if method == "replay" else "lazy"}
        super().__init__(data, given, 0.0 if self.shrinks else value, process, absent)
        weights = averaged_weights(self.state.model)
        tables = {
            name.split(".")[-2]: local_shards(weight)[0][0] for name, weight in weights.items() if "_bags." in name
        }
        self.tables = {key: (table, torch.zeros(len(table))) for key, table in tables.items()}
        self.waiting = deque[Batch]()

    def batches(self, step: int) -> Iterator[Batch]:
        self.waiting.clear()
        for batch in super().batches(step):
            self.waiting.append(batch)
            yield batch

    def after_step(self) -> None:
        batch = self.waiting.popleft()
        for key, (table, last) in self.tables.items() if self.shrinks else ():
            touched = batch.sparse[key].values().long().unique()
            absent = (self.state.steps - last[touched]) / self.steps
            table[touched] *= (1 - self.shrinks * absent).clamp(min=0).unsqueeze(1)
            last[touched] = float(self.state.steps)


def study(given: argparse.Namespace, data: Path, method: str, value: float, process: Process) -> None:
    key = {"bed": data.name, "method": method, "value": value, "seed": given.seed}
    earlier = given.output.read_text().splitlines() if given.output.exists() else []
    if any(json.loads(line).items() >= {**key, "epoch": EPOCHS}.items() for line in earlier):
        return
    bed = MethodBed(data, given, method, value, process)
    for epoch in range(1, EPOCHS + 1):
        for number in range(1, STATES + 1):
            bed.train((epoch - 1) * bed.steps + bed.steps * number // STATES)
            bed.average.add()
        last = bed.quality()
        with bed.average.shown():
            mean = bed.quality()
        about = {
            "batch_size": bed.plan.config.train.batch_size,
            "samples": bed.plan.train_rows,
            **bed.state.environment,
        }
        with given.output.open("a") as output:
            output.write(json.dumps({**key, "epoch": epoch, "last": last, "mean": mean, **about}) + "\n")


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def print_table(file: Path) -> None:
    runs: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines_of(file):
        runs.setdefault((line["bed"], line["method"], line["value"], line["seed"]), []).append(line)
    for (bed, method, value, seed), lines in sorted(runs.items()):
        for kind in ("last", "mean"):
            aucs = " ".join(f"{line[kind]['validation_auc']:.4f}" for line in lines)
            losses = " ".join(f"{line[kind]['validation_logloss']:.4f}" for line in lines)
            print(f"{bed:10} {method:6} {value:<7g} seed {seed} {kind}  validation {aucs}  {losses}")


def plot(file: Path, picture: Path, values: dict[str, float]) -> None:
    """Draws the test AUC after each epoch, means over seeds, of each method at one value; a panel for each data set."""
    import matplotlib.pyplot as plt

    found = lines_of(file)
    beds = list(dict.fromkeys(line["bed"] for line in found))
    figure, panels = plt.subplots(1, len(beds), figsize=(11, 3.8), layout="constrained")
    for panel, bed in zip(panels, beds, strict=True):
        for method, value in values.items():
            curve = []
            for epoch in range(1, EPOCHS + 1):
                key = {"bed": bed, "method": method, "value": value, "epoch": epoch}
                aucs = [line["last"]["auc"] for line in found if line.items() >= key.items()]
                curve.append(sum(aucs) / len(aucs))
            panel.plot(range(1, EPOCHS + 1), curve, marker="o")
            panel.annotate(f" {method}", (EPOCHS, curve[-1]), va="center", color=panel.lines[-1].get_color())
        panel.set(title=NAMES.get(bed, bed), xlabel="epoch", xlim=(0.8, EPOCHS + 1.3), xticks=range(1, EPOCHS + 1))
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("test AUC, mean of three seeds")
    figure.suptitle(
        "Ids are learnt by heart from epoch to epoch; the paper's L2 at every step (replay) prevents most of it"
    )
    figure.savefig(picture, dpi=120)


def main() -> None:
    parser = arguments_of_beds(__doc__)
    for method in METHODS:
        parser.add_argument(f"--{method.lower()}", type=numbers, default=[], help="values of the method")
    parser.add_argument("--plot", type=Path, help="picture to draw, of the first value of each method")
    given = parser.parse_args()
    if given.table:
        print_table(given.output)
        return
    values = {method: getattr(given, method.lower()) for method in METHODS}
    if given.plot:
        plot(given.output, given.plot, {method: found[0] for method, found in values.items()})
        return
    with process_group("cpu") as process:
        for data in given.data.split(","):
            for method, wanted in values.items():
                for value in wanted:
                    study(given, Path(data), method, value, process)


if __name__ == "__main__":
    main()
