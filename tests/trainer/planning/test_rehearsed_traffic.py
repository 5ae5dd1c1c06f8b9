"""A rehearsed step sends as many bytes, in each kind of collective, as real processes do on the same batches."""

import dataclasses
import json
import math
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from collectives import Traffic
from cowrec.data_pipeline import Schema
from cowrec.trainer.config.run import RunConfig, load_config
from cowrec.trainer.planning.rank_step import fake_group, letters, rehearse
from cowrec.trainer.planning.samples import global_batch
from cowrec.trainer.planning.timed_step import TimedRank, training_alone
from cowrec.trainer.runtime.processes import Process, process_group
from cowrec.trainer.sharded_model.build import dense_parameters
from cowrec.trainer.sharded_model.run_plan import RunPlan
from cowrec.trainer.training.dataloading import even_slices, training_readers
from cowrec.trainer.training.state import TrainState
from process_groups import in_processes
from trainer_cases import config_file, free_port, launched_as, make_data

STEPS = 2
MIXED = 'sharding.tables={city="row_wise",tags="column_wise",history="data_parallel"}'
CASES = {
    "table_wise": ["sharding.plan=table_wise"],
    "row_wise": ["sharding.plan=row_wise"],
    "column_wise": ["sharding.plan=column_wise", "model.embedding_dim=15"],
    "table_row_wise": ["sharding.plan=table_row_wise"],
    "data_parallel": ["sharding.plan=data_parallel"],
    "mixed": ["sharding.plan=table_wise", MIXED, "model.embedding_dim=15"],
    "three kinds": [
        "sharding.plan=table_wise",
        'sharding.tables={city="row_wise",tags="column_wise"}',
        "model.embedding_dim=15",
    ],
    "mixed, no clip": ["sharding.plan=table_wise", MIXED, "model.embedding_dim=15", "clip.rule=none"],
    "lazy": ["sharding.plan=row_wise", "optimizer.absent_rows=lazy"],
}


def _train(rank: int, folder: Path, port: int, processes: int) -> None:
    launched_as(rank, processes, port)
    with process_group("cpu") as process:
        for name, settings in CASES.items():
            found = _take_steps(load_config(folder / "run.toml", settings), folder / "data", process)
            (folder / f"{name}.{rank}").write_text(json.dumps(found))


def _take_steps(config: RunConfig, data: Path, process: Process) -> dict[str, dict[str, Any]]:
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, dir=str(data)))
    plan = RunPlan.of(config, Schema.load(data).of_batches(), process)
    reader, state = training_readers(plan).train, TrainState(plan)
    batches = state.ids.training_batches(islice(even_slices(reader.epoch(0), process.world_size), STEPS))
    with Traffic() as traffic:
        for _ in range(STEPS):
            state.step(batches)
    # In its first step DistributedDataParallel also agrees on the parameters in use, an int32 of each.
    traffic.sent["all_reduce"] -= 4 * len(dense_parameters(state.model))
    assert state.adam
    lookups = state.adam.lookups
    memory = {
        "tables": sum(each.lookup.flat_weights().nbytes for each in lookups),
        "moments": sum(moment.nbytes for each in lookups for moment in each.state[1:]),
        "last_steps": sum(each.replay.last_step.nbytes for each in lookups if each.replay),
        "network": 4 * sum(each.nbytes for each in dense_parameters(state.model).values()),
    }
    return {"sent": traffic.sent, "memory": memory, "touched": _touched(state)}


def _touched(state: TrainState) -> dict[str, list[int]]:
    """Last steps of the rows of each lookup, in replay."""
    lookups = state.adam.lookups if state.adam else []
    return {str(number): each.replay.last_step.tolist() for number, each in enumerate(lookups) if each.replay}


def _train_alone(_: int, folder: Path, name: str, rank: TimedRank) -> None:
    config, schema = load_config(folder / "run.toml", CASES[name]), Schema.load(folder / "data")
    with training_alone(config, schema, rank) as state:
        batches = iter(rank.batches)
        for _ in range(STEPS):
            loss = float(state.step(batches).loss)
            assert math.isfinite(loss)
        (folder / f"{name}.alone").write_text(json.dumps(_touched(state)))


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.thorough)])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    folder, processes = tmp_path_factory.mktemp("traffic"), int(request.param)
    make_data(folder)
    config_file(folder)
    in_processes(_train, (folder, free_port(), processes), processes)
    return folder, processes


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_real_processes(trained: tuple[Path, int], name: str) -> None:
    folder, processes = trained
    config, schema = load_config(folder / "run.toml", CASES[name]), Schema.load(folder / "data")
    for rank in (0, processes - 1):
        process, sent = Process(rank, processes, processes, False, torch.device("cpu")), Counter[str]()
        real = json.loads((folder / f"{name}.{rank}").read_text())
        for step in range(STEPS):
            batch = global_batch(config, folder / "data", step)
            with fake_group(process):
                mail = letters(config, schema, process, [batch], [rank])[0][rank]
                rehearsed = rehearse(config, schema, process, batch, mail)
            for each in rehearsed.collectives:
                sent[each.kind] += each.sent
            assert rehearsed.memory | real["memory"] == rehearsed.memory
        assert sent == Counter(real["sent"]), (name, rank)


@pytest.mark.parametrize("name", ["table_wise", "row_wise", "column_wise", "table_row_wise", "three kinds"])
def test_a_rank_without_peers_trains_the_rows_that_it_trains_with_them(trained: tuple[Path, int], name: str) -> None:
    folder, processes = trained
    config, schema, rank = load_config(folder / "run.toml", CASES[name]), Schema.load(folder / "data"), processes - 1
    process = Process(rank, processes, processes, False, torch.device("cpu"))
    batches = [global_batch(config, folder / "data", step) for step in range(STEPS)]
    with fake_group(process):
        mails = [each[rank] for each in letters(config, schema, process, batches, [rank])]
    slices = [each.slice_of(rank, processes) for each in batches]
    in_processes(_train_alone, (folder, name, TimedRank(process, slices, mails)), 1)
    real = json.loads((folder / f"{name}.{rank}").read_text())["touched"]
    alone = json.loads((folder / f"{name}.alone").read_text())
    assert real.keys() == alone.keys()
    for lookup, steps in real.items():
        assert any(steps)
        assert steps == alone[lookup], lookup
