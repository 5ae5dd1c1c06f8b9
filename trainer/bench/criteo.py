"""Criteo's shape for `cowrec bench`: timed training steps of a model in the state that most of an epoch leaves.

The state is constructed, not trained. The cost of a step depends on which rows it reads and on their absence, which
both follow from the ids alone. Weights are initial values. Rows seen before have the moments that one gradient of
realistic size leaves.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from cowrec.data_pipeline import Batch, DenseField, Schema, SparseField
from cowrec.data_pipeline.dataset.sample_block import SampleBlock
from cowrec.data_pipeline.synthetic.criteo_frequencies import NUM_DENSE
from cowrec.data_pipeline.synthetic.criteo_ids import CriteoIds
from cowrec.errors import UserError
from cowrec.models import ModelConfig, physical_dim, require_model
from cowrec.names import require, require_choices
from cowrec.sparse_opt import AdamConfig, EmbeddingAdam

from ..config.run import RunConfig, load_config, with_values
from ..config.sections import TrainConfig
from ..runtime.environment import prepare_process
from ..runtime.processes import process_group
from ..sharded_model.build import build_sharded, dense_parameters, embedding_optimizer
from ..sharded_model.check_run import check_run
from ..sharded_model.run_plan import RunPlan
from ..sharded_model.step import DenseAdam, Pipeline, SequentialSteps, pipeline_of, why_not_captured
from .parts import (
    PROFILED_STEPS,
    UNTIMED_STEPS,
    bytes_per_sample,
    graph_captured,
    memory,
    reset_peak_memory,
    step_times,
    step_values,
)

EPOCH_SAMPLES = 41_256_555
"""Samples of Criteo's training split as published: nine tenths of 45,840,617."""
_CRITEO = Path(__file__).parents[1] / "configs" / "criteo.toml"
_MOST_STEPS, _LEAST_STEPS, _MOST_SAMPLES = 256, 8, 1 << 20
"""Limits on the steps of a combination, so that their batches fit into memory."""
_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Bench:
    """Settings of a benchmark, which the flags of `cowrec bench` describe.

    Each combination of modes, clips, precisions and batch sizes is one line. ``max_rows`` of None is Criteo's full
    vocabulary. Raises UserError for a value that is unknown, out of range or repeated.
    """

    modes: Sequence[str] = ("replay", "lazy", "dense")
    batch_sizes: Sequence[int] = (1024, 8192, 65536)
    model: str = "deepfm"
    max_rows: int | None = None
    epoch_share: float = 0.9
    seconds: float = 20.0
    clips: Sequence[str] = ("on",)
    precisions: Sequence[str] = ("float32",)
    device: str = "cpu"

    def __post_init__(self) -> None:
        require_model(ModelConfig(name=self.model))
        modes, precisions = get_type_hints(AdamConfig)["absent_rows"], get_type_hints(TrainConfig)["precision"]
        require_choices("--absent-rows", self.modes, get_args(modes))
        require_choices("--clip", self.clips, ("on", "off"))
        require_choices("--precision", self.precisions, get_args(precisions))
        require_choices("--device", [self.device], ("cpu", "cuda"))
        require_choices("--batch-sizes", self.batch_sizes, self.batch_sizes)
        require("--batch-sizes", min(self.batch_sizes), min(self.batch_sizes) >= 1, "at least 1")
        if self.device == "cpu" and "tf32" in self.precisions:
            raise UserError("--precision tf32 exists on CUDA only; add --device cuda, or measure float32 or bfloat16")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda, but torch sees no GPU; measure with --device cpu or check the driver")

    @property
    def samples(self) -> int:
        """Number of samples before the measurement starts: complete steps of the largest batch."""
        largest = max(self.batch_sizes)
        return max(round(self.epoch_share * EPOCH_SAMPLES / largest), 1) * largest


def criteo_config(
    model: str, batch_size: int, mode: str, clip: str = "on", precision: str = "float32", device: str = "cpu"
) -> RunConfig:
    """Makes the published settings for Criteo, those of trainer/configs/criteo.toml, at a batch size."""
    train = {"batch_size": batch_size, "device": device, "precision": precision}
    published = load_config(_CRITEO)
    rule = {"rule": published.clip.rule if clip == "on" else "none"}
    return with_values(published, model={"name": model}, train=train, optimizer={"absent_rows": mode}, clip=rule)


@dataclass(frozen=True)
class Case:
    """One combination to measure.

    Attributes:
        samples: number of samples of the stream before the measurement.
        last_samples: file with the result of :meth:`CriteoIds.last_samples` for these samples.
        seconds: time after which no further step is timed.
    """

    config: RunConfig
    ids: CriteoIds
    samples: int
    last_samples: Path
    max_steps: int
    seconds: float

    @property
    def batch_size(self) -> int:
        return self.config.train.batch_size

    @property
    def warmup_steps(self) -> int:
        return UNTIMED_STEPS[self.config.train.device]

    @property
    def steps_before(self) -> int:
        return self.samples // self.batch_size


def cases(settings: Bench, ids: CriteoIds, last_samples: Path) -> Iterator[Case]:
    """Yields the combinations by batch size, so that results to compare are measured close together."""
    variants = (settings.precisions, settings.modes, settings.clips)
    for batch_size, precision, mode, clip in product(settings.batch_sizes, *variants):
        steps = min(max(_MOST_SAMPLES // batch_size, _LEAST_STEPS), _MOST_STEPS)
        yield Case(
            criteo_config(settings.model, batch_size, mode, clip, precision, settings.device),
            *(ids, settings.samples, last_samples, steps, settings.seconds),
        )


def run_ids(ids: CriteoIds, samples: int) -> np.ndarray:
    """Runs :meth:`CriteoIds.last_samples` on the first samples of the stream, with a progress bar."""
    total = samples * len(ids.table_rows)
    hidden = not sys.stderr.isatty()
    with tqdm(total=total, unit=" ids", desc="ids before", unit_scale=True, leave=False, disable=hidden) as bar:
        return ids.last_samples(samples, bar.update)


class SteadyRun(NamedTuple):
    """Training in the state that the samples of a case leave.

    Attributes:
        step: takes the step of a number, from 0.
        batches: batches on the device, one for each step.
        ids: ids of each field in the first timed batch, on CPU.
        rss_before: memory before the tables, in bytes.
    """

    step: Callable[[int], object]
    model: nn.Module
    adam: EmbeddingAdam
    dense: DenseAdam
    pipeline: Pipeline
    batches: Iterator[Batch]
    ids: list[Tensor]
    device: torch.device
    rss_before: int


@contextmanager
def steady_run(case: Case) -> Iterator[SteadyRun]:
    """Builds the model of a case and brings it into the steady state, with batches for all steps and a profile."""
    with process_group(case.config.train.device) as process:
        reset_peak_memory(process.device)
        schema = make_schema(case)
        first_batch = _batches(case, schema, 0, 1)
        steps = case.warmup_steps + case.max_steps + PROFILED_STEPS
        timed = _batches(case, schema, case.steps_before * case.batch_size, steps)
        batches = iter([batch.to(process.device) for batch in (*first_batch, *timed)])
        rss_before = memory("VmRSS", process.device)
        check_run(case.config, schema, process, stream=True)
        plan = RunPlan.of(case.config, schema, process)
        model = build_sharded(plan)
        adam = embedding_optimizer(plan, model)
        assert isinstance(adam, EmbeddingAdam)
        scaled = plan.scaled.hyperparameters
        dense = DenseAdam(dense_parameters(model), scaled, case.config.optimizer.adam_epsilon)
        captured = None if why_not_captured(plan, model, adam) else adam
        pipeline = pipeline_of(model, dense, process, captured=captured, batch_size=case.batch_size)
        dense.prepare(0, scaled.dense_lr)
        pipeline.progress(batches)
        enter_steady_state(case, adam, _gradient_size(adam, first_batch[0], scaled.betas[1]), scaled.betas)
        ids = [field.values() for field in timed[0].sparse.to_dict().values()]

        def step(index: int) -> None:
            dense.prepare(case.steps_before + index, scaled.dense_lr)
            pipeline.progress(batches)

        yield SteadyRun(step, model, adam, dense, pipeline, batches, ids, process.device, rss_before)


def measure_criteo(case: Case) -> Iterator[dict[str, Any]]:
    """Yields the values of a case's line, see :func:`bench`, and step_seconds, as they become known.

    On CPU call it in a process of its own, whose peak memory is then the case's.
    """
    prepare_process()
    with steady_run(case) as run:
        device = run.device
        timed = step_times(run.step, case.batch_size, case.max_steps, case.seconds, device)
        stored_tensors = stored(run.adam).items()
        moments_bytes = sum(tensor.nbytes for key, tensor in stored_tensors if ".exp_avg" in key)
        yield {
            **timed,
            "captured": graph_captured(run.pipeline, device),
            "minutes_of_10_epochs": 10 * EPOCH_SAMPLES / timed["samples_per_second"] / 60,
            "table_rows": int(case.ids.table_rows.sum()),
            "table_bytes": moments_bytes // 2,  # float32 weights, like each of the two moments
            "moments_bytes": moments_bytes,
            "rss_before_tables_bytes": run.rss_before,
            "steps_before": case.steps_before,
        }
        width = physical_dim(case.config.model.embedding_dim)
        distinct_rows = sum(len(ids.unique()) for ids in run.ids) / case.batch_size
        # A captured step has no parts, so the profile is of steps that are not.
        parts = SequentialSteps(run.model, run.dense, device)
        yield from step_values(
            timed["step_ms"],
            case.batch_size,
            lambda: parts.progress(run.batches),
            dense_parameters(run.model),
            bytes_per_sample(len(run.ids), width, distinct_rows),
            case.config.train.precision,
            device,
        )


def make_schema(case: Case) -> Schema:
    sizes = case.ids.table_rows.tolist()
    return Schema(
        name="criteo",
        dense=tuple(DenseField(f"I{n + 1}") for n in range(NUM_DENSE)),
        sparse=tuple(SparseField(f"C{f + 1}", size) for f, size in enumerate(sizes)),
        splits={},
    )


def _batches(case: Case, schema: Schema, first: int, count: int) -> list[Batch]:
    """Makes batches of the stream from sample ``first`` on; dense features and labels are noise of Criteo's shape."""
    size, generator = case.batch_size, torch.Generator().manual_seed(first)
    made = []
    for start in range(first, first + count * size, size):
        ids = torch.from_numpy(case.ids.rows(start, size))
        # Real counts, scaled by their maximum, are mostly small.
        dense = torch.rand(size, NUM_DENSE, generator=generator).pow_(3)
        label = (torch.rand(size, generator=generator) < 0.25).float()
        made.append(SampleBlock(dense, label, ids.t(), {}).batch(schema, size))
    return made


def _gradient_size(adam: EmbeddingAdam, batch: Batch, beta2: float) -> Tensor:
    """Computes the root mean square of the first step's gradients from the second moments of its rarest rows: [P].

    Gradients of frequent rows do not matter: these rows are never absent for long.
    """
    state, of_field = stored(adam), batch.sparse.to_dict()
    found = {field: ids.values().long().unique(return_counts=True) for field, ids in of_field.items()}
    second = torch.cat([state[f"{field}.exp_avg_sq"][rows] for field, (rows, _) in found.items()])
    counts = torch.cat([counts for _, counts in found.values()])
    return (second[counts == counts.min()].mean(0) / (1 - beta2)).sqrt().cpu()


def enter_steady_state(case: Case, adam: EmbeddingAdam, size: Tensor, betas: tuple[float, float]) -> None:
    """Sets moments and last steps of all rows to their values after ``steps_before`` steps."""
    adam.steps = case.steps_before
    state = stored(adam)
    beta1, beta2 = betas
    device = next(iter(state.values())).device
    generator, size = torch.Generator(device).manual_seed(1), size.to(device)
    start = 0
    for field, rows in enumerate(case.ids.table_rows.tolist(), 1):
        kept = [key for key in ("exp_avg", "exp_avg_sq", "last_step") if f"C{field}.{key}" in state]
        for first in range(0, rows, _ROWS_AT_ONCE):
            count = min(_ROWS_AT_ONCE, rows - first)
            last = _last_steps(case, start + first, count).to(device)
            gradient = torch.randn(count, len(size), generator=generator, device=device) * size * (last > 0)[:, None]
            values = {
                "exp_avg": (1 - beta1) * gradient,
                "exp_avg_sq": (1 - beta2) * gradient.square(),
                "last_step": last[:, None],
            }
            for key in kept:
                state[f"C{field}.{key}"][first : first + count] = values[key]
        start += rows


def stored(adam: EmbeddingAdam) -> dict[str, Tensor]:
    """Returns the state of the tables as it is, by "<table>.<name>"; the one process holds all of it."""
    with adam.as_stored():  # reading must not bring rows up to date
        state = adam.state_dict()["state"]
    return {
        f"{key.split('.')[-2]}.{name}": value.local_shards()[0].tensor
        for key, table in state.items()
        for name, value in table.items()
        if hasattr(value, "local_shards")
    }


def _last_steps(case: Case, first: int, count: int) -> Tensor:
    # The file is mapped again for every block, because its mapped pages count as memory of this process.
    samples = np.load(case.last_samples, mmap_mode="r")[first : first + count]
    return torch.from_numpy(last_steps(samples, case.batch_size, case.steps_before))


def last_steps(last_samples: np.ndarray, batch_size: int, steps: int) -> np.ndarray:
    """Finds the step (from 1) of each row's last sample (from 1, 0 for none) in a stream of ``steps`` steps: int32."""
    found: np.ndarray = np.minimum(-(-last_samples.astype(np.int32) // np.int32(batch_size)), np.int32(steps))
    return found
