"""A run that saves a checkpoint and goes on, beside one that resumes from it: what the GPU check compares."""

import tempfile
from pathlib import Path
from typing import Any

import torch

from cowrec.data_pipeline.dataset.sample_block import SampleBlock
from cowrec.data_pipeline.synthetic.criteo_ids import CriteoIds
from cowrec.trainer.bench.criteo import Case, criteo_config, make_schema
from cowrec.trainer.config.sections import CheckpointConfig
from cowrec.trainer.runs.checkpoint import Checkpoints, Progress
from cowrec.trainer.runs.local_copy import RunPlace
from cowrec.trainer.runtime.processes import process_group
from cowrec.trainer.sharded_model.run_plan import LrSchedule, RunPlan
from cowrec.trainer.training.state import TrainState

from .rows import trained_values


def resume(device: torch.device) -> dict[str, Any]:
    """Compares a run that saves a checkpoint and goes on with one that resumes from it."""
    on_cuda = device.type == "cuda"
    ids, size, steps = CriteoIds(max_rows=1000 if on_cuda else 4), 64 if on_cuda else 2, 6 if on_cuda else 2
    config = criteo_config("deepfm", size, "replay", "on", "float32", device.type)
    with tempfile.TemporaryDirectory() as folder, process_group(device.type) as process:
        schema = make_schema(Case(config, ids, 0, Path(folder), 0, 0.0))
        numbers = torch.rand(2 * steps * size, len(schema.dense), generator=torch.Generator().manual_seed(0))
        rows = torch.from_numpy(ids.rows(0, len(numbers))).t()
        samples = SampleBlock(numbers, numbers[:, 0].round(), rows, {})
        batches = [samples.take(each).batch(schema, size).to(device) for each in torch.arange(len(rows)).split(size)]
        plan = RunPlan.of(config, schema, process, schedule=LrSchedule(2 * steps))
        run, resumed = TrainState(plan), TrainState(plan)
        checkpoints = Checkpoints(RunPlace(Path(folder), resume=True), CheckpointConfig(), process)
        for each in batches[:steps]:
            run.step(iter([each]))
        run.save(checkpoints, Progress(run.steps, device=device.type))
        checkpoints.finish()
        progress, values = resumed.resume(checkpoints), []
        for state in (run, resumed):
            assert state.adam
            for each in batches[steps:]:
                state.step(iter([each]))
            values.append(trained_values(state.model, state.adam))
    unequal = sum(int((one != two).sum()) for one, two in zip(*values, strict=True))
    equal = unequal == 0 and progress is not None
    return {"equal": equal, "unequal": unequal, "resumed_after": progress.step if progress else None}
