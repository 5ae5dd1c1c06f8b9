"""State of training: a sharded model with its optimizers and id tables, the training step, and how it is saved."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cowrec.data_pipeline import Batch
from cowrec.sparse_opt import EmbeddingAdam, IdTables
from cowrec.sparse_opt.optim.collection_adam import LRS
from cowrec.sparse_opt.tbe.collection import set_rates
from cowrec.sparse_opt.tbe.inventory import ModelInventory

from ..config.run import to_plain
from ..config.sections import OnNonfinite
from ..measures.clip_metrics import ClipWatch
from ..runs.checkpoint import Checkpoints, Progress, State, WriteFiles, choose_checkpoint
from ..runs.checkpoint_files import Fetch, all_present, checkpoint_keys, read_checkpoint, readable
from ..runtime.environment import environment
from ..sharded_model.build import (
    build_sharded,
    dense_parameters,
    dense_tensors,
    embedding_optimizer,
    random_state,
    seed_process,
)
from ..sharded_model.id_translation import IdTranslation
from ..sharded_model.run_plan import RunPlan, by_table, shown_name
from ..sharded_model.step import CapturedSteps, DenseAdam, pipeline_of, why_not_captured
from ..sharded_model.step_guard import StepGuard, not_finite
from .weight_average import WeightAverage, averaged_weights


class Step(NamedTuple):
    """Result of a training step, from the weights before its update.

    Attributes:
        loss: scalar, detached.
        logits: float32 [B], detached.
        label: float32 [B].
        dense_lr, embedding_lr: learning rates of the network and of the tables.
        set_aside: why the batch changed neither weights nor moments, and is no step; "" if it was trained on.
    """

    loss: Tensor
    logits: Tensor
    label: Tensor
    dense_lr: float
    embedding_lr: float
    set_aside: str = ""


class TrainState:
    """Everything that training changes: the model, its optimizers, the id tables and the number of steps.

    Args:
        on_nonfinite: "skip" drops a batch that would make the state non-finite; "stop" does not look at it.
        reads_ahead: see :class:`ActiveRun`.

    Attributes:
        embedding_optimizer, dense_optimizer: optimizers of the tables and of the network.
        ids: translates the ids of batches, which the pipeline takes translated.
        pipeline: runs steps and evaluation.
        why_not_captured: why no step can be a captured CUDA graph; "" if they can.
        clip_watch: reads the clip's statistics; None without a clip.
        logit_shift: correction of predictions for the negatives that the training split lacks, see `Schema`.
        steps: number of training steps taken.
        set_aside: number of batches that were not trained on.
        environment: versions and hardware.

    Raises:
        UserError: the model or its optimizers cannot be built.
    """

    def __init__(self, plan: RunPlan, on_nonfinite: OnNonfinite = "stop", reads_ahead: bool = True) -> None:
        self.plan = plan
        config, schema, process = plan.config, plan.schema, plan.process
        self._config, self._process = config, process
        self.logit_shift = schema.logit_shift
        self.model = build_sharded(plan)
        self.embedding_optimizer = embedding_optimizer(plan, self.model)
        self.ids = IdTranslation(plan, self.model, self.adam)
        self.clip_watch: ClipWatch | None = None
        if self.embedding_optimizer is not None and config.clip.rule != "none":
            tables = {spec.name: shown_name(spec.name) for spec in plan.tables}
            self.clip_watch = ClipWatch(self.embedding_optimizer.stats, tables, process)
        self._values = plan.scaled.hyperparameters
        if self.adam and config.optimizer.wide == "ftrl":
            self.model.module.loss.tell_samples = self.adam.set_ftrl_samples
        self._guard = StepGuard(self.model, process) if on_nonfinite == "skip" else None
        admits = self._guard.admits if self._guard else None
        dense = dense_parameters(self.model)
        self.dense_optimizer = DenseAdam(dense, self._values, config.optimizer.adam_epsilon, admits)
        self.why_not_captured = why_not_captured(plan, self.model, self.embedding_optimizer)
        if self._guard:
            self.why_not_captured = 'on_nonfinite = "skip" decides on the host whether a step is taken'
        self.pipeline = pipeline_of(
            self.model,
            self.dense_optimizer,
            process,
            may_read_ahead=reads_ahead and self.ids.tables is None,
            captured=None if self.why_not_captured else self.adam,
            batch_size=config.train.batch_size,
        )
        self.steps, self.set_aside, self._passes = 0, 0, 1
        self.average = WeightAverage(self.model) if config.train.average else None
        # A network may have masks of -inf.
        self._finite = {name: tensor.isfinite().all() for name, tensor in dense_tensors(self.model.module).items()}
        self.environment = environment(process.device)

    @property
    def adam(self) -> EmbeddingAdam | None:
        """The tables' optimizer, None where it is FBGEMM's fused one."""
        return self.embedding_optimizer if isinstance(self.embedding_optimizer, EmbeddingAdam) else None

    @property
    def captured(self) -> bool:
        return isinstance(self.pipeline, CapturedSteps) and self.pipeline.captured

    @property
    def id_tables(self) -> IdTables | None:
        """The tables that give rows to ids; None where ids are rows or hashes."""
        return self.ids.tables

    def _accumulate(self, passes: int) -> None:
        if passes != self._passes:
            assert self.embedding_optimizer is not None
            self.embedding_optimizer.accumulate(passes)
            self.dense_optimizer.accumulate(passes)
            self._passes = passes

    def step(self, batches: Iterator[Batch], passes: int = 1) -> Step:
        """Trains on the next batch, which ``self.ids`` has translated, or on several that are parts of one."""
        self._accumulate(passes)
        dense_lr = self.plan.schedule.dense_lr(self._values, self.steps)
        embedding_lr = self.plan.schedule.embedding_lr(self._values, self.steps)
        self.dense_optimizer.prepare(self.steps, dense_lr)
        self._set_embedding_lr(embedding_lr)
        loss, logits, label = self.pipeline.progress(batches)
        if passes > 1:
            others = [self.pipeline.progress(batches) for _ in range(passes - 1)]
            loss = torch.stack([loss, *(output[0] for output in others)]).sum()
            logits = torch.cat([logits, *(output[1] for output in others)])
            label = torch.cat([label, *(output[2] for output in others)])
        set_aside = self._guard.reason if self._guard else ""
        self.steps += not set_aside
        self.set_aside += bool(set_aside)
        return Step(loss, logits, label, dense_lr, embedding_lr, set_aside)

    def _set_embedding_lr(self, lr: float) -> None:
        if self.adam:
            self.adam.lr = lr
        elif self.plan.schedule.lr_decay != "none":  # else the rate never changes
            set_rates(self.model.fused_optimizer, lr, by_table(self._config.optimizer.embedding_lr_factors))

    def save(self, checkpoints: Checkpoints, progress: Progress, write_files: WriteFiles | None = None) -> None:
        """Writes a checkpoint; see :meth:`Checkpoints.save`. Replayed rows are saved without the steps they missed."""
        about = {"world_size": self._process.world_size, "config": to_plain(self._config), **self.environment}
        with self._as_stored():
            checkpoints.save(self._everything() | random_state(self._process), progress, about, write_files)

    def not_finite(self) -> str:
        """Finds the name of a weight or moment that is not finite, and was at the start; "" if all are finite."""
        with self._as_stored():
            state = self._everything()
            for key in {"model", "average"} & state.keys():
                state[key] = {name: tensor for name, tensor in state[key].items() if self._finite.get(name, True)}
            return not_finite(state, self._process)

    def resume(self, checkpoints: Checkpoints) -> Progress | None:
        """Loads the newest intact checkpoint of the run in place; returns None where there is none.

        If the number of processes or the kind of device has changed, random numbers start anew. Raises UserError as
        :func:`find_checkpoint` does, or if the checkpoint does not fit the run.
        """
        found = checkpoints.find()
        if found is None:
            return None
        path, progress = found
        with readable(path), self._as_stored():
            keys = checkpoint_keys(path)
            random = {
                key: {kind: numbers for kind, numbers in generators.items() if f"{key}.{kind}" in keys}
                for key, generators in random_state(self._process).items()
                if f"{key}.cpu" in keys
            }
            mean = self.average.empty_state() if self.average and "averaged" in keys else {}
            state = self._everything(progress.step) | random | mean
            read_checkpoint(path, state, checkpoints.fetch)
            self._load(state)
            if self.average and mean:
                self.average.load(mean)
            self.model.fused_optimizer.set_optimizer_step(int(state["iterations"]))
            if not random:
                seed_process(self._config.train.seed, self._process, progress.step)
            for generators in random.values():
                torch.set_rng_state(generators["cpu"])
                if "cuda" in generators:
                    torch.cuda.set_rng_state(generators["cuda"], self._process.device)
        self.steps, self.set_aside = progress.step, progress.set_aside
        if self.clip_watch:
            self.clip_watch.add_earlier(progress.clip)
        return progress

    def load_weights(self, folder: Path, checkpoint: str = "", fetch: Fetch = all_present) -> Progress:
        """Loads the weights and id tables of the checkpoint of :func:`choose_checkpoint`, to use or export the model.

        If the checkpoint has a mean of the weights, the model gets the mean.

        Raises UserError as that function does, or if the checkpoint does not fit the model.
        """
        keep_best = self._config.checkpoint.keep_best
        path, progress = choose_checkpoint(folder, keep_best, checkpoint, self._process, fetch)
        with readable(path), self._as_stored():
            state = self._weights(progress.step)
            read_checkpoint(path, state, fetch)
            self._load(state)
        if "averaged" in checkpoint_keys(path):
            read_checkpoint(path, {"average": averaged_weights(self.model)}, fetch)
        return progress

    def with_kept_weights(self) -> AbstractContextManager[None]:
        """Gives the model the weights that a run measures and keeps, within the block: the mean, if there is one."""
        return self.average.shown() if self.average else nullcontext()

    def _as_stored(self) -> AbstractContextManager[None]:
        """Saves and loads replayed rows as they are within the block; see :meth:`EmbeddingAdam.as_stored`."""
        return self.adam.as_stored() if self.adam else nullcontext()

    def _weights(self, steps: int | None = None) -> State:
        """Returns weights and id tables, sharing their memory, and under replay the state that brings rows up to date.

        ``steps`` is given to read the state from a checkpoint after so many steps.
        """
        state: State = {"model": self.model.state_dict()}
        if self.id_tables:
            state["id_tables"] = self.id_tables.state_dict()
        return state | (self._tables(steps) if self.adam else {})

    def _everything(self, steps: int | None = None) -> State:
        """Returns all tensors that training changes, except for random states, as :meth:`_weights` does."""
        state = self._weights(steps)
        state |= {"dense_optimizer": self.dense_optimizer.tensors(), "iterations": self._iterations()}
        state |= self.average.state() if self.average else {}
        return state | ({} if self.adam else self._tables(steps))

    def _tables(self, steps: int | None) -> State:
        optimizer = self.adam or self.model.fused_optimizer
        tables = {key: dict(entries) for key, entries in optimizer.state_dict()["state"].items()}
        for entries in tables.values():
            if LRS in entries:
                rates = entries[LRS] if steps is None else [0.0] * steps
                entries[LRS] = torch.tensor(rates, dtype=torch.float64)
        # A process without tables has an empty dictionary, which the library would pickle as an object.
        return {"embedding_optimizer": tables} if tables else {}

    def _load(self, state: State) -> None:
        self.model.load_state_dict(state["model"])
        if self.id_tables:
            self.id_tables.load_state_dict(state["id_tables"])
        if self.adam:
            tables = state["embedding_optimizer"]
            for entries in tables.values():
                if LRS in entries:
                    entries[LRS] = entries[LRS].tolist()
            self.adam.load_state_dict({"state": tables})

    def _iterations(self) -> Tensor:
        """Returns the number of forward passes as FBGEMM counts them; ranks without a table count none."""
        counted = torch.tensor(max((lookup.iterations for lookup in ModelInventory(self.model).lookups), default=0))
        if dist.get_world_size() > 1:
            counted = counted.to(self.model.device)
            dist.all_reduce(counted, dist.ReduceOp.MAX)
        return counted
