"""One measurement of `cowrec bench`: timed training steps of a model in the state that most of an epoch leaves.

The state is constructed, not trained. The cost of a step depends on which rows it reads and on their absence, which
both follow from the ids alone. Other values are plausible: weights are initial values, and rows seen before have the
moments that one gradient of realistic size leaves.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cowrec.data_pipeline import Batch, DenseField, Schema, SparseField
from cowrec.data_pipeline.dataset.sample_block import SampleBlock
from cowrec.data_pipeline.synthetic.criteo_ids import CriteoIds
from cowrec.data_pipeline.synthetic.planted import NUM_DENSE
from cowrec.sparse_opt import EmbeddingAdam
from cowrec.trainer.config.run import RunConfig
from cowrec.trainer.runtime.environment import prepare_process
from cowrec.trainer.runtime.processes import process_group
from cowrec.trainer.sharded_model.build import build_sharded, dense_parameters, embedding_optimizer
from cowrec.trainer.sharded_model.dense_adam import DenseAdam
from cowrec.trainer.sharded_model.run_plan import RunPlan
from cowrec.trainer.training.pipeline import Pipeline, SequentialSteps, pipeline_of, why_not_captured

from .absence import last_steps
from .roofline import Rates, flops_per_sample, measure_rates
from .step_parts import Profile, profile_steps
from .timing import WARMUP_STEPS, graph_captured, memory, reset_peak_memory, step_times

_PROFILED_STEPS = 5
_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Case:
    """One combination to measure.

    Attributes:
        config: the run's configuration.
        ids: the stream of ids.
        spacing: distance of two ids' rows; tables are that many times larger.
        epoch_samples: samples of an epoch, for the dense learning rate's warm-up.
        samples: samples of the stream before the measurement.
        last_samples: file with the result of :meth:`CriteoIds.last_samples` for these samples.
        max_steps: most steps to time.
        seconds: time after which no further step is timed.
    """

    config: RunConfig
    ids: CriteoIds
    spacing: int
    epoch_samples: int
    samples: int
    last_samples: Path
    max_steps: int
    seconds: float

    @property
    def batch_size(self) -> int:
        return self.config.train.batch_size

    @property
    def warmup_steps(self) -> int:
        return WARMUP_STEPS[self.config.train.device]

    @property
    def steps_before(self) -> int:
        return self.samples // self.batch_size


@dataclass(frozen=True)
class Measurement:
    """Result of a measurement.

    Attributes:
        step_seconds: time of each step.
        host_seconds: processor time of this process per step, of all its threads together.
        captured: whether the steps replayed a CUDA graph; None on CPU.
        replayed_row_steps: missed steps that were computed, per sample; None for modes other than replay.
        table_rows, table_bytes, moments_bytes: sizes of the tables and of both moments.
        rss_before_tables, peak_memory: bytes of memory of the process before the tables were made, and its peak; on
            CUDA those that torch allocated on the device.
        profile: parts of a step.
        rates: this machine's rates.
        flops_per_sample: operations of the dense network, see :func:`flops_per_sample`.
    """

    step_seconds: list[float]
    host_seconds: float
    captured: bool | None
    replayed_row_steps: float | None
    table_rows: int
    table_bytes: int
    moments_bytes: int
    rss_before_tables: int
    peak_memory: int
    profile: Profile
    rates: Rates
    flops_per_sample: float


def measure(case: Case) -> Measurement:
    """Measures a case; on CPU call it in its own process, whose peak memory is then the case's."""
    prepare_process()
    with process_group(case.config.train.device) as process:
        reset_peak_memory(process.device)
        schema = make_schema(case)
        first_batch = _batches(case, schema, 0, 1)
        steps = case.warmup_steps + case.max_steps + 1 + _PROFILED_STEPS
        timed = _batches(case, schema, case.steps_before * case.batch_size, steps)
        on_device = [batch.to(process.device) for batch in (*first_batch, *timed)]
        rss_before = memory("VmRSS", process.device)
        plan = RunPlan.of(case.config, schema, process)
        model = build_sharded(plan)
        adam = embedding_optimizer(plan, model)
        assert isinstance(adam, EmbeddingAdam)
        values = plan.scaled.hyperparameters
        dense = DenseAdam(dense_parameters(model), values, case.config.optimizer.adam_epsilon)
        captured = None if why_not_captured(plan, model, adam) else adam
        pipeline = pipeline_of(model, dense, process, captured=captured, batch_size=case.batch_size)
        batches = iter(on_device)
        dense.prepare(0, values.dense_lr)
        pipeline.progress(batches)
        enter_steady_state(case, adam, _gradient_size(adam, first_batch[0], values.betas[1]), values.betas)

        def step(index: int) -> None:
            dense.prepare(case.steps_before + index, values.dense_lr)
            pipeline.progress(batches)

        seconds, host_seconds = step_times(step, case.warmup_steps, case.max_steps, case.seconds, process.device)
        # Read before the forward passes of the probe, which are not part of training.
        peak = memory("VmHWM", process.device)
        replayed = None
        if case.config.optimizer.absent_rows == "replay":
            model.eval()
            following = timed[case.warmup_steps + len(seconds)]
            replayed = _replayed(adam, pipeline, following, batches) / case.batch_size
            model.train()
        # A captured step has no parts, so the profile is of steps that are not.
        parts = SequentialSteps(model, dense, process.device)
        profile = profile_steps(lambda: parts.progress(batches), _PROFILED_STEPS, process.device)
        rates = measure_rates(process.device, case.config.train.precision)
        flops = flops_per_sample(dense_parameters(model))
        was_captured = graph_captured(pipeline, process.device)
        state = _stored(adam)
    moments = [tensor for key, tensor in state.items() if key.endswith((".exp_avg", ".exp_avg_sq"))]
    moments_bytes = sum(tensor.nbytes for tensor in moments)
    table_rows = sum(field.num_embeddings for field in schema.sparse)
    # Weights are float32, like each of the two moments.
    bytes_ = (moments_bytes // 2, moments_bytes, rss_before, peak)
    return Measurement(seconds, host_seconds, was_captured, replayed, table_rows, *bytes_, profile, rates, flops)


def make_schema(case: Case) -> Schema:
    sizes = (case.ids.table_rows * case.spacing).tolist()
    return Schema(
        name="criteo",
        dense=tuple(DenseField(f"I{n + 1}") for n in range(NUM_DENSE)),
        sparse=tuple(SparseField(f"C{f + 1}", size) for f, size in enumerate(sizes)),
        splits={},
    )


def _batches(case: Case, schema: Schema, first: int, count: int) -> list[Batch]:
    """Batches of the stream from sample ``first`` on; dense features and labels are noise of Criteo's shape."""
    size, generator = case.batch_size, torch.Generator().manual_seed(first)
    made = []
    for start in range(first, first + count * size, size):
        ids = torch.from_numpy(case.ids.rows(start, size)).mul_(case.spacing)
        # Real counts, scaled by their maximum, are mostly small.
        dense = torch.rand(size, NUM_DENSE, generator=generator).pow_(3)
        label = (torch.rand(size, generator=generator) < 0.25).float()
        made.append(SampleBlock(dense, label, ids.t(), {}).batch(schema, size))
    return made


def _gradient_size(adam: EmbeddingAdam, batch: Batch, second_decay: float) -> Tensor:
    """Root mean square of the gradients that the first step left in the second moments of its rarest rows: float [P].

    Gradients of frequent rows are larger sums, but do not matter, since these rows are never absent for long.
    """
    second, counts = _rows_of(batch, _stored(adam), "exp_avg_sq")
    return (second[counts == counts.min()].mean(0) / (1 - second_decay)).sqrt().cpu()


def enter_steady_state(case: Case, adam: EmbeddingAdam, size: Tensor, betas: tuple[float, float]) -> None:
    """Sets the moments and, if there are any, the last steps of all rows to their values after ``steps_before``."""
    adam.steps = case.steps_before
    state = _stored(adam)
    first_decay, second_decay = betas
    device = next(iter(state.values())).device
    generator, size = torch.Generator(device).manual_seed(1), size.to(device)
    start = 0
    for field, rows in enumerate(case.ids.table_rows.tolist(), 1):
        table = {
            key: state[f"C{field}.{key}"]
            for key in ("exp_avg", "exp_avg_sq", "last_step")
            if f"C{field}.{key}" in state
        }
        for tensor in table.values():
            tensor.zero_()
        for first in range(0, rows, _ROWS_AT_ONCE):
            count = min(_ROWS_AT_ONCE, rows - first)
            last = _last_steps(case, start + first, count).to(device)
            gradient = torch.randn(count, len(size), generator=generator, device=device) * size * (last > 0)[:, None]
            values = {
                "exp_avg": (1 - first_decay) * gradient,
                "exp_avg_sq": (1 - second_decay) * gradient.square(),
                "last_step": last[:, None],
            }
            for key, tensor in table.items():
                tensor[:: case.spacing][first : first + count] = values[key]
        start += rows


def _stored(adam: EmbeddingAdam) -> dict[str, Tensor]:
    """The state of the tables, all of which is in this one process, by "<table>.<name>"."""
    with adam.as_stored():  # reading must not bring rows up to date
        state = adam.state_dict()["state"]
    return {
        f"{key.split('.')[-2]}.{name}": value.local_shards()[0].tensor
        for key, table in state.items()
        for name, value in table.items()
        if hasattr(value, "local_shards")
    }


def _last_steps(case: Case, first: int, count: int) -> Tensor:
    # Mapped again for every block, because a mapped file's pages count as memory of this process.
    samples = np.load(case.last_samples, mmap_mode="r")[first : first + count]
    return torch.from_numpy(last_steps(samples, case.batch_size, case.steps_before))


def _replayed(adam: EmbeddingAdam, pipeline: Pipeline, batch: Batch, batches: Iterator[Batch]) -> int:
    """Steps that the catch-up of the next batch's rows computes, from their last steps before and after.

    A row that has decayed meanwhile has the last step ``~t``, where t is the step from which on it computes no more.
    """
    before = _last_steps_of(adam, batch)
    with torch.no_grad():
        pipeline.progress(batches)
    after = _last_steps_of(adam, batch)
    after = torch.where(after < 0, ~after, after)
    return int((after - before)[before >= 0].sum())


def _last_steps_of(adam: EmbeddingAdam, batch: Batch) -> Tensor:
    return _rows_of(batch, _stored(adam), "last_step")[0][:, 0]


def _rows_of(batch: Batch, state: Mapping[str, Tensor], key: str) -> tuple[Tensor, Tensor]:
    """The state of a batch's distinct rows, field by field, [U, columns], and their counts, int64 [U]."""
    fields = batch.sparse.to_dict()
    found = {field: ids.values().long().unique(return_counts=True) for field, ids in fields.items()}
    values = [state[f"{field}.{key}"][rows] for field, (rows, _) in found.items()]
    return torch.cat(values), torch.cat([counts for _, counts in found.values()])
