"""Quality against the length of a run: rates that fall to 0, constant rates, the mean of the weights, and short decays.

    python scripts/research/large_batch/epochs.py --data DATA/bed --output results/HARDWARE/epochs.jsonl

Each line is a measurement on the validation samples (a split, else the last tenth of the training split) and on the
test split. Kinds of lines: "fall", rates that fall to 0 over d epochs; "constant", constant rates after t epochs;
"mean", the mean of their weights as `train.average` takes it, after t epochs; "window", the plain mean over the last d
epochs; "branch", rates that fall to 0 over d epochs from constant ones after t. A measurement that has a line is not
repeated. `--table` prints the file as a table.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cowrec.data_pipeline import Batch, Schema
from cowrec.trainer.config.run import RunConfig, with_defaults, with_values
from cowrec.trainer.config.sections import LrDecay
from cowrec.trainer.runs.checkpoint import State
from cowrec.trainer.runs.local_copy import RunPlace
from cowrec.trainer.runtime.processes import Process, process_group
from cowrec.trainer.sharded_model.build import local_shards
from cowrec.trainer.sharded_model.run_plan import LrSchedule, RunPlan
from cowrec.trainer.training.active_run import ActiveRun
from cowrec.trainer.training.evaluation import evaluate
from cowrec.trainer.training.trainer import keep_resident, training_readers
from cowrec.trainer.training.weight_average import STATES, WeightAverage, averaged_weights

Share = Callable[[int], float]
"""Share of the learning rates that is left at a step."""


class Shares(LrSchedule):
    """Learning rates that a function gives, which may be exchanged."""

    share: Share

    def _left(self, step: int) -> float:
        return self.share(step)


def tensors_of(state: State) -> list[Tensor]:
    """The local tensors of nested dictionaries, in a fixed order."""
    found = []
    for key in sorted(state):
        value = state[key]
        found += tensors_of(value) if isinstance(value, dict) else [shard for shard, _ in local_shards(value)]
    return found


class Bed:
    """A run on a data set that can go back to an earlier state."""

    def __init__(
        self, data: Path, given: argparse.Namespace, l2: float, process: Process, more: dict[str, Any] | None = None
    ) -> None:
        schema = Schema.load(data)
        rows, held_out = schema.split("train").rows, 0.0 if "validation" in schema.splits else 0.1
        train = {"seed": given.seed, "validation_fraction": held_out, "batch_size": given.batch_size, "epochs": 1}
        decay: LrDecay = "none"
        optimizer = {"l2": l2 / rows, "lr_decay": decay, **(more or {})}
        config = with_values(RunConfig(), data={"dir": str(data)}, train=train, optimizer=optimizer)
        # A frozen schedule holds a function that is exchanged.
        self.schedule = Shares()
        plan = RunPlan.of(with_defaults(config, rows), schema.of_batches(), process, schedule=self.schedule)
        self.readers = training_readers(plan)
        self.run = ActiveRun(plan, RunPlace(Path(tempfile.mkdtemp()) / "run", resume=False))
        keep_resident(self.readers, plan)
        self.plan, self.state, self.steps = plan, self.run.state, plan.epoch_steps
        self.average = WeightAverage(self.state.model)

    def snapshot(self) -> tuple[int, list[Tensor], Tensor]:
        with self.state._as_stored():
            state = [tensor.clone() for tensor in tensors_of(self.state._everything())]
        return self.state.steps, state, torch.get_rng_state()

    def restore(self, snapshot: tuple[int, list[Tensor], Tensor]) -> None:
        steps, earlier, random = snapshot
        with self.state._as_stored():
            state = self.state._everything(steps)
            for tensor, value in zip(tensors_of(state), earlier, strict=True):
                tensor.copy_(value)
            self.state._load(state)
            self.state.model.fused_optimizer.set_optimizer_step(int(state["iterations"]))
        torch.set_rng_state(random)
        self.state.steps = steps

    def batches(self, step: int) -> Iterator[Batch]:
        while True:
            epoch, first = divmod(step, self.steps)
            for batch in self.readers.train.epoch(epoch, first):
                yield self.state.ids.training(batch, in_order=False) if self.state.ids.translates else batch
                step += 1

    def train(self, until: int, share: Share = lambda _: 1.0) -> None:
        object.__setattr__(self.schedule, "share", share)
        self.state.pipeline.reset()
        batches, steps = self.batches(self.state.steps), until - self.state.steps
        limited = (batch for batch, _ in zip(batches, range(steps), strict=False))
        for _ in range(steps):
            self.run.step(limited)
            self.after_step()
        self.run.checked_loss()

    def after_step(self) -> None:
        """Is called after each step."""

    def fall(self, steps: int) -> None:
        """Trains so many steps, over which the rates fall to 0."""
        first = self.state.steps
        self.train(first + steps, lambda step: 1 - (step - first) / steps)

    def quality(self) -> dict[str, float]:
        found = evaluate(self.state, self.readers.measured), evaluate(self.state, self.readers.test)
        names = [f"{split}{measure}" for split in ("validation_", "") for measure in ("auc", "logloss")]
        return dict(zip(names, (value for each in found for value in (each.auc, each.logloss)), strict=True))

    def quality_of(self, mean: list[Tensor]) -> dict[str, float]:
        kept = self.snapshot()
        weights = tensors_of({"model": averaged_weights(self.state.model)})
        for weight, value in zip(weights, mean, strict=True):
            weight.copy_(value)
        found = self.quality()
        self.restore(kept)
        return found


class Study:
    """The measurements of a bed that have no line yet."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.output: Path = given.output
        lines = self.output.read_text().splitlines() if self.output.exists() else []
        self.done = {tuple(json.loads(line)["key"]) for line in lines}

    def lacks(self, *key: Any) -> bool:
        return key not in self.done

    def write(self, *key: Any, **values: Any) -> None:
        with self.output.open("a") as output:
            output.write(json.dumps({"key": key, **values}) + "\n")


def study_bed(given: argparse.Namespace, data: Path, l2: float, process: Process) -> None:
    bed, study, of = Bed(data, given, l2, process), Study(given), (data.name, given.seed, given.batch_size, l2)
    about = {"bed": data.name, "seed": given.seed, "l2": l2, "batch_size": bed.plan.config.train.batch_size}
    about |= {"samples": bed.plan.train_rows, "epoch_steps": bed.steps, **bed.state.environment}
    start = bed.snapshot()
    for epochs in given.falls:
        if study.lacks(*of, "fall", epochs):
            bed.restore(start)
            bed.fall(epochs * bed.steps)
            study.write(*of, "fall", epochs, kind="fall", t=0, d=epochs, **bed.quality(), **about)
    if not study.lacks(*of, "end"):
        return
    bed.restore(start)
    best, best_at, of_epochs = math.inf, 0, list[list[Tensor]]()
    for epoch in range(1, given.most + 1):
        states = []
        for number in range(1, STATES + 1):
            bed.train((epoch - 1) * bed.steps + bed.steps * number // STATES)
            bed.average.add()
            states.append([tensor.clone() for tensor in tensors_of({"model": averaged_weights(bed.state.model)})])
        of_epochs.append([torch.stack(values).mean(0) for values in zip(*states, strict=True)])
        constant = bed.quality()
        study.write(*of, "constant", epoch, kind="constant", t=epoch, d=0, **constant, **about)
        with bed.average.shown():
            mean = bed.quality()
        study.write(*of, "mean", epoch, kind="mean", t=epoch, d=0, **mean, **about)
        study.write(*of, "window", epoch, kind="window", t=epoch, d=1, **bed.quality_of(of_epochs[-1]), **about)
        here = bed.snapshot()
        for length in given.branches if epoch <= 4 else ():
            bed.fall(round(length * bed.steps))
            study.write(*of, "branch", epoch, length, kind="branch", t=epoch, d=length, **bed.quality(), **about)
            bed.restore(here)
        if mean["validation_logloss"] < best:
            best, best_at = mean["validation_logloss"], epoch
        if epoch - best_at >= given.wait:
            break
    study.write(*of, "end", kind="end")


def print_table(file: Path) -> None:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in sorted((line for line in lines if line["kind"] != "end"), key=lambda line: str(line["key"])):
        print(
            f"{line['bed']:12} {line['samples']:9,} seed {line['seed']} l2 {line['l2']:g}/N {line['kind']:8} t={line['t']:<3}"
            f" d={line['d']:<4} validation {line['validation_auc']:.4f} {line['validation_logloss']:.4f}  test"
            f" {line['auc']:.4f} {line['logloss']:.4f}"
        )


def numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",") if number]


def arguments_of_beds(description: str) -> argparse.ArgumentParser:
    """The arguments of every study on beds."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--data", help="data sets, separated by commas")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=0, help="0: the default")
    parser.add_argument("--table", action="store_true", help="print the file")
    return parser


def main() -> None:
    parser = arguments_of_beds(__doc__)
    parser.add_argument("--most", type=int, default=12, help="epochs at constant rates")
    parser.add_argument("--wait", type=int, default=2, help="epochs after the best mean after which they end")
    parser.add_argument(
        "--falls", type=lambda text: [int(number) for number in numbers(text)], default=[1, 2, 3, 4, 6, 8]
    )
    parser.add_argument("--branches", type=numbers, default=[0.5, 1.0])
    parser.add_argument("--l2", type=numbers, default=[40.0], help="times 1 / (training samples)")
    given = parser.parse_args()
    if given.table:
        print_table(given.output)
        return
    with process_group("cpu") as process:
        for data in given.data.split(","):
            for l2 in given.l2:
                study_bed(given, Path(data), l2, process)


if __name__ == "__main__":
    main()
