"""Plans of clusters: their bytes are those of real processes and of formulas; what does not fit, what is refused."""

import dataclasses
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commands.command_line import Cowrec
from cowrec.data_pipeline import Batch, Schema, SparseField
from cowrec.trainer.config.run import config_from, load_config
from cowrec.trainer.planning.plan import Cluster, RankPlan, plan_batch
from cowrec.trainer.runtime.processes import Process, process_group
from cowrec.trainer.sharded_model.build import dense_parameters
from cowrec.trainer.sharded_model.run_plan import RunPlan
from cowrec.trainer.training.dataloading import training_readers
from cowrec.trainer.training.state import TrainState
from process_groups import in_processes
from trained_runs import data_folder
from trainer_cases import free_port, launched_as

NAMES = {"alltoall": "all_to_all", "allreduce": "all_reduce", "allgather": "all_gather"}


class Traffic(TorchDispatchMode):
    """Counts the bytes that this process sends in each kind of collective."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            kind = func.__name__.partition(".")[0].strip("_").removesuffix("_base")
            inputs = args[0] if "allreduce" in kind else args[1]
            tensors = [each for each in (inputs if isinstance(inputs, list) else [inputs]) if torch.is_tensor(each)]
            self.sent[NAMES.get(kind, kind)] += sum(each.numel() * each.element_size() for each in tensors)
        return func(*args, **(kwargs or {}))


KINDS = ("table_wise", "row_wise", "column_wise", "table_row_wise", "data_parallel")
CASES = {kind: [f"sharding.plan={kind}"] for kind in KINDS} | {
    "lazy": ["sharding.plan=row_wise", "optimizer.absent_rows=lazy"],
    "three kinds": ["sharding.plan=table_wise", 'sharding.tables={city="row_wise",tags="column_wise"}'],
}
EXCHANGES = {"three kinds": 3, "data_parallel": 0}
"""Kinds of sharding whose ids are exchanged, if not one."""


folder = data_folder()


def run_plan(folder: Path, name: str, process: Process) -> RunPlan:
    """A case of batches that all processes have even slices of."""
    config = load_config(folder / "run.toml", [*CASES[name], "model.embedding_dim=15", "train.batch_size=48"])
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, dir=str(folder / "data")))
    return RunPlan.of(config, Schema.load(folder / "data").of_batches(), process)


def _train(rank: int, folder: Path, port: int, processes: int) -> None:
    launched_as(rank, processes, port)
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    with process_group("cpu") as process:
        for name in CASES:
            plan = run_plan(folder, name, process)
            state = TrainState(plan)
            batches = map(state.ids.training, training_readers(plan).train.epoch(0))
            with Traffic() as traffic:
                state.step(iter([next(batches)]))
            assert state.adam
            memory = {
                "tables": sum(each.lookup.flat_weights().nbytes for each in state.adam.lookups),
                "moments": sum(moment.nbytes for each in state.adam.lookups for moment in each.state[1:]),
                "last_steps": sum(each.last_step.nbytes for each in state.adam.lookups if each.replays),
                "network": 4 * sum(each.nbytes for each in dense_parameters(state.model).values()),
            }
            # In its first step DistributedDataParallel also agrees on the parameters in use, an int32 of each.
            traffic.sent["all_reduce"] -= 4 * len(dense_parameters(state.model))
            (folder / f"{name}.{rank}").write_text(json.dumps({"sent": traffic.sent, "memory": memory}))


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.thorough)])
def trained(request: pytest.FixtureRequest, folder: Path) -> int:
    in_processes(_train, (folder, free_port(), request.param), request.param)
    return int(request.param)


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_real_processes(trained: int, folder: Path, name: str) -> None:
    """Of all together, since of ids the plan knows the mean of a sample; of data-parallel rows it knows the most."""
    alone = run_plan(folder, name, Process(0, 1, 1, False, torch.device("cpu")))
    batch = next(training_readers(alone).train.epoch(0))
    plan = plan_batch(alone.config, alone.schema, batch, Cluster(hosts=trained // 2, devices=2, device="cpu"))
    planned: dict[int, RankPlan] = {rank: kind for kind in plan.ranks for rank in kind.ranks}
    real = [json.loads((folder / f"{name}.{rank}").read_text()) for rank in range(trained)]
    for rank, found in enumerate(real):
        assert planned[rank].memory | found["memory"] == planned[rank].memory
    parts = sum((Counter(each.sent) for each in planned.values()), Counter[str]())
    sent = sum((Counter(each["sent"]) for each in real), Counter[str]())
    assert sent["all_reduce"] - parts["network"] == pytest.approx(parts["clip"], abs=trained)
    sizes = 8 * trained * 4 * trained * EXCHANGES.get(name, 1)  # of ids, lengths and weights, and the batch size
    if name == "data_parallel":
        assert 0 < sent["all_gather"] <= parts["copies"] + 8 * trained
        assert set(parts) == {"network", "copies"}
    else:
        exchanged = sum(sent[kind] for kind in ("all_to_all", "reduce_scatter", "all_gather"))
        planned_bytes = parts["ids"] + parts["rows"] + parts["row_gradients"]
        assert exchanged - sizes == pytest.approx(planned_bytes, abs=8 * trained)


P, b, F, d, ROWS = 4, 32, 8, 16, 1000
B = P * b


GRADIENTS = {"row_gradients": 4 * d * b * F}
SENT = {
    "table_wise": {"ids": 8 * b * F, "rows": 4 * d * b * F, **GRADIENTS},
    "row_wise": {"ids": 4 * (b + B) * F, "rows": 4 * d * B * F, **GRADIENTS},
    "column_wise": {"ids": 8 * 4 * b * F, "rows": 4 * d * b * F, "clip": 16 * 4 * b * F, **GRADIENTS},
    "data_parallel": {"copies": 8 * (d + 3) * b * F},
}


@pytest.mark.parametrize("kind", SENT)
def test_formulas_of_bytes(kind: str) -> None:
    """Those of docs/scaling.md, for ranks with even shares of one-hot fields; and the bytes of all rows."""
    keys, ids = [f"C{n}" for n in range(F)], torch.randint(ROWS, (F * B,), dtype=torch.int32)
    batch = Batch(torch.zeros(B, 0), KeyedJaggedTensor(keys, ids, lengths=torch.ones_like(ids)), torch.zeros(B))
    sections = {
        "train": {"batch_size": B, "device": "cpu"},
        "model": {"embedding_dim": d - 1, "hidden": [8]},
        "optimizer": {"embedding_lr": 2e-3, "l2": 1e-5},
        "sharding": {"plan": kind},
    }
    schema = Schema("even", (), tuple(SparseField(key, ROWS) for key in keys), splits={})
    plan = plan_batch(config_from(sections), schema, batch, Cluster(hosts=2, devices=2, device="cpu"))
    assert sorted(rank for each in plan.ranks for rank in each.ranks) == list(range(P))
    share = F * ROWS // (1 if kind == "data_parallel" else P)
    # Columns are split in four, and each shard has a last step for its rows.
    steps = share * (4 if kind == "column_wise" else 1)
    for each in plan.ranks:
        assert {part: size for part, size in each.sent.items() if part != "network"} == SENT[kind]
        held = (4 * d * share, 8 * d * share, 4 * steps)
        assert tuple(each.memory[part] for part in ("tables", "moments", "last_steps")) == held
        # TorchRec counts an id with eight bytes, as FBGEMM's kernels read it, and the rows of the global batch.
        assert kind != "table_wise" or each.memory["ids_and_rows"] == F // P * B * (8 + 4 * d)


def plan(cowrec: Cowrec, folder: Path, cluster: str, *settings: str) -> tuple[str, dict[str, Any]]:
    """What the command prints and writes."""
    given = [part for each in settings for part in ("--set", each)]
    command = ("plan", folder / "run.toml", "--data", folder / "data", *cluster.split())
    code, printed, said = cowrec(*command, "--output", folder / "plan.json", *given)
    assert code == 0, said
    return printed, json.loads((folder / "plan.json").read_text())


def test_plan_names_what_does_not_fit_and_what_does(cowrec: Cowrec, folder: Path) -> None:
    """Five million rows of 256 bytes with their moments, of which unified memory takes all but the last steps."""
    small = "--hosts 1 --devices 2 --memory-gb 4 --host-memory-gb 64"
    large = ("id_table.kind=hash", "id_table.capacity=5M", "model.embedding_dim=63", "sharding.plan=table_wise")
    printed, found = plan(cowrec, folder, small, "train.device=cuda", *large)
    assert re.search(r"does not fit: rank \d needs \d+\.\d GB of its GPU's 4: tables \d", printed)
    assert 'sharding.plan = "row_wise", sharding.memory = "uvm"' in printed
    assert '"row_wise", sharding.memory = "device"' not in printed
    assert "without sharding.tables" not in printed
    assert (bool(found["misfits"]), found["cluster"]["devices"]) == (True, 2)
    of_one = 'sharding.tables={city="data_parallel"}'
    printed, _ = plan(cowrec, folder, small, "train.device=cuda", *large, of_one)
    assert 'sharding.plan = "row_wise", sharding.memory = "uvm", without sharding.tables' in printed
    settings = (*large, "sharding.memory=uvm", "train.device=cuda")
    (largest, *_) = plan(cowrec, folder, small, *settings)[1]["ranks"]
    assert largest["device_bytes"] < sum(largest["memory"].values()) - 12 * 64 * 5_000_000
    assert largest["host_bytes"] > 2 * 12 * 64 * 5_000_000  # with a checkpoint's copy
    for flag, size in (("--memory-gb", "inf"), ("--host-memory-gb", "inf")):
        code, _, said = cowrec("plan", folder / "run.toml", "--data", folder / "data", "--hosts", "1", flag, size)
        assert (code, f"{flag} must be above 0 and finite, got {size}" in said) == (2, True), said


def test_what_torchrecs_planner_cannot_fit_is_planned_table_wise_and_has_remedies(cowrec: Cowrec, folder: Path) -> None:
    large = ("id_table.kind=hash", "id_table.capacity=5M", "model.embedding_dim=63", "sharding.plan=auto")
    small = "--hosts 1 --devices 2 --memory-gb 4 --host-memory-gb 64"
    printed, found = plan(cowrec, folder, small, "train.device=cuda", *large)
    assert "does not fit: TorchRec's planner cannot fit the tables on 2 processes" in printed
    assert 'shown is "table_wise"' in found["misfits"][0]
    assert re.search(r"rank \d needs \d+\.\d GB of its GPU's 4", found["misfits"][1])
    assert 'sharding.plan = "row_wise", sharding.memory = "uvm"' in printed


def test_torchrecs_planner_plans_without_its_gpus(cowrec: Cowrec, folder: Path) -> None:
    _, found = plan(cowrec, folder, "--hosts 2", "train.device=cuda", "sharding.plan=auto")
    assert sorted(rank for each in found["ranks"] for rank in each["ranks"]) == list(range(16))
