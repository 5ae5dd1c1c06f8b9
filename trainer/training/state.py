"""What learns: a sharded model with its optimizers, and how its state is saved and found again."""

from pathlib import Path
from typing import Any

from cowrec.data_pipeline import Schema
from cowrec.sparse_opt import EmbeddingAdam, IdTables
from cowrec.trainer.config.run import RunConfig, to_plain
from cowrec.trainer.runs.checkpoint import Beside, Checkpoints, load_run, random_state, run_state
from cowrec.trainer.runs.checkpoint_folder import Progress
from cowrec.trainer.runs.run_dir import environment
from cowrec.trainer.runtime.processes import Process
from cowrec.trainer.sharded_model.build import (
    build_sharded,
    dense_parameters,
    derived_hyperparameters,
    embedding_optimizer,
    row_ids_of,
)
from cowrec.trainer.sharded_model.dense_adam import DenseAdam
from cowrec.trainer.sharded_model.tables import table_specs

from .clip_metrics import ClipWatch


class TrainState:
    """The model of a run and its optimizers, all of a run's state but its place in the data.

    Args:
        config: of the run.
        schema: of its data.
        process: this process.
        warmup_steps: over which the dense learning rate rises.

    Attributes:
        model: sharded.
        embedding_optimizer: see :func:`embedding_optimizer`.
        dense_optimizer: of the network.
        clip_watch: reads what the clip does, None without a clip.
        environment: versions and hardware.

    Raises:
        ValueError: as :func:`build_sharded` and :func:`embedding_optimizer`.
    """

    def __init__(self, config: RunConfig, schema: Schema, process: Process, warmup_steps: int):
        self._config, self._process = config, process
        self.model = build_sharded(config, schema, process)
        self.embedding_optimizer = embedding_optimizer(config, schema, self.model)
        self.clip_watch: ClipWatch | None = None
        if self.embedding_optimizer is not None and config.clip.rule != "none":
            tables = [spec.name for spec in table_specs(schema, config.id_table)]
            self.clip_watch = ClipWatch(self.embedding_optimizer.stats, tables, process)
        lr = derived_hyperparameters(config).dense_lr
        self.dense_optimizer = DenseAdam(dense_parameters(self.model), config.optimizer, lr, warmup_steps)
        self.environment = environment(process.device)

    @property
    def adam(self) -> EmbeddingAdam | None:
        """The tables' optimizer, where it is not FBGEMM's fused one."""
        return self.embedding_optimizer if isinstance(self.embedding_optimizer, EmbeddingAdam) else None

    @property
    def id_tables(self) -> IdTables | None:
        """Those that give ids their rows; None where ids are rows or hashes."""
        ids = row_ids_of(self.model)
        return ids.tables if ids else None

    def save(self, checkpoints: Checkpoints, progress: Progress, beside: Beside | None = None) -> None:
        """Writes a checkpoint; see :meth:`Checkpoints.save`."""
        state = run_state(self.model, self.dense_optimizer, self.adam) | random_state(self._process)
        about = {"world_size": self._process.world_size, "config": to_plain(self._config), **self.environment}
        checkpoints.save(state, progress, about, beside)

    def resume(self, folder: Path, checkpoints: Checkpoints) -> Progress | None:
        """Takes over the newest intact checkpoint of a folder; None where it has none. See :func:`load_run`."""
        found = load_run(folder, self.model, self.dense_optimizer, self.adam, self._process, checkpoints.say)
        if found is None:
            return None
        checkpoints.latest, progress = found
        if self.clip_watch:
            self.clip_watch.go_on_from(progress.clip)
        return progress

    def clip_counts(self) -> dict[str, Any]:
        """Rows and clipped rows so far, as :attr:`Progress.clip` has them."""
        return self.clip_watch.counts() if self.clip_watch else {}
