"""Replayed rows equal those of the dense update, whenever their ids occur again and whenever they are read.

While no row is at rest, both are bit-identical: they run the same float32 operations. A row at rest is set to zero,
which the dense update only approaches; hence a tolerance of 1e-6 of the largest value that the row ever had.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import cos
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.optim.keyed import CombinedOptimizer

from cowrec.sparse_opt import (
    AdamConfig,
    ClipRule,
    ConstantClip,
    CowClip,
    EmbeddingAdam,
    FtrlConfig,
    NoClip,
    ReferenceCowClip,
)
from cowrec.sparse_opt.optim.replay import converging_rate
from process_groups import in_processes, process_group
from random_problems.drawing import Problem, small_problem
from random_problems.training import assert_equal, batch_of, gathered, sharded_model, state_of
from tiers import tiered

pytest_plugins = ["one_group"]
pytestmark = pytest.mark.usefixtures("group")
Tensors = dict[str, np.ndarray]
State = Mapping[str, ShardedTensor | torch.Tensor]


@dataclass(frozen=True)
class Stream:
    """Ids that recur with fixed periods: row i of a table occurs every ``periods[i % len(periods)]`` steps; 0 is never.

    A row in a batch has one to three occurrences, in any samples, also twice in a bag.
    """

    steps: int = 330
    periods: tuple[int, ...] = (1, 10, 37, 300, 0)
    adam: AdamConfig = field(default_factory=lambda: AdamConfig(lr=1e-3, l2=1e-3, eps=1e-7, adam_epsilon="keras"))
    rule: ClipRule = field(default_factory=lambda: CowClip(r=1.0, zeta=1e-5))
    schedule: Callable[[int], float] | None = None
    lr_factors: Mapping[str, float] = field(default_factory=dict)
    gradients: float = 1e-3
    clip_columns: int = 6
    sharding: str = "row_wise"
    read_at: tuple[int, ...] = ()
    compared_at: tuple[int, ...] = ()

    @property
    def problem(self) -> Problem:
        return small_problem(rows=(20, 5, 60), batch=8, sharding=self.sharding, world=dist.get_world_size())

    def drawn(self, step: int) -> dict[str, Any]:
        """Bags and output gradients of step ``step``, from 1, as a problem draws them."""
        rng, drawn = np.random.default_rng((0, step)), {}
        for table in self.problem.collections[0].tables:
            periods = {row: self.periods[row % len(self.periods)] for row in range(table.rows)}
            due = [row for row, period in periods.items() if period and step % period == 0]
            for name in table.features:
                ids_of_sample: list[list[int]] = [[] for _ in range(8)]
                for row in due:
                    for sample in rng.integers(0, 8, rng.integers(1, 4)):
                        ids_of_sample[sample].append(row)
                drawn[name] = [(np.array(ids, np.int64), np.ones(len(ids), np.float32)) for ids in ids_of_sample]
                drawn[f"target {name}"] = (rng.normal(size=(8, 8)) * self.gradients).astype(np.float32)
        return drawn

    def batch(self, step: int) -> Any:
        """This rank's samples of a step."""
        size, rank = 8 // dist.get_world_size(), dist.get_rank()
        return batch_of(self.problem, [self.drawn(step)], rank * size, (rank + 1) * size)


def train(stream: Stream, absent_rows: str) -> tuple[dict[int, Tensors], Tensors]:
    """States at ``compared_at`` and the end, and the largest values that rows ever had, over the default group."""
    model = sharded_model(stream.problem)
    config = replace(stream.adam, absent_rows=absent_rows)
    settings: dict[str, Any] = {"clip_columns": stream.clip_columns, "lr_factors": stream.lr_factors}
    optimizer = EmbeddingAdam(model, config, stream.rule, **settings)
    states: dict[int, Tensors] = {}
    shards = {key: tensors_here(value) for key, value in current(model, optimizer).items()}
    largest = {key: [abs(array).amax(1) for array in of_key] for key, of_key in shards.items()}
    for step in range(stream.steps + 1):
        if step and stream.schedule:
            optimizer.lr = stream.schedule(step)
        if step:
            model(stream.batch(step))[0].backward()
        if absent_rows == "dense":
            for key, of_key in shards.items():
                for most, array in zip(largest[key], of_key, strict=True):
                    torch.maximum(most, abs(array).amax(1), out=most)
        if step in stream.read_at:
            with torch.no_grad():  # the ids of another step
                model(stream.batch(step // 37 * 37 or 37))
            model.state_dict()
        if step in (*stream.compared_at, stream.steps):
            states[step] = {key: gathered(value).copy() for key, value in current(model, optimizer).items()}
    scales = {key: np.concatenate([array.numpy() for array in of_key]) for key, of_key in largest.items() if of_key}
    optimizer.remove()
    return states, scales


def tensors_here(value: ShardedTensor | torch.Tensor) -> list[torch.Tensor]:
    return [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value.detach()]


def current(model: nn.Module, optimizer: EmbeddingAdam) -> State:
    optimizer.flush()
    state = {f"{key.split('.')[-2]}.weight": value for key, value in model.state_dict().items() if "embedding" in key}
    for key, own in optimizer.state_dict()["state"].items():
        state |= {f"{key.split('.')[-2]}.{name}": value for name, value in own.items() if "exp_avg" in name}
    return state


def assert_close(replayed: dict[int, Tensors], dense: dict[int, Tensors], scales: Tensors) -> None:
    for step, state in dense.items():
        for key, expected in state.items():
            error = abs(replayed[step][key] - expected).max(1) / np.maximum(scales[key], 1e-30)
            assert error.max() <= 1e-6, f"{key} at step {step}: row {error.argmax()} is off by {error.max():.1e}"


def warm_up_then_cosine(step: int) -> float:
    return 1e-3 * min(step / 50, 1) * (0.55 + 0.45 * cos(step / 200))


STREAMS = {
    "clip never binds, a schedule": Stream(
        adam=AdamConfig(lr=1e-3, l2=1e-4), gradients=1e-7, schedule=warm_up_then_cosine
    ),
    "clip binds": Stream(gradients=1.0, rule=ReferenceCowClip(r=0.3, bound=1e-4), clip_columns=8),
    "absent rows are clipped": Stream(adam=AdamConfig(lr=1e-3, l2=0.1), rule=CowClip(r=0.05, zeta=1e-4)),
    "constant, table-wise": Stream(
        adam=AdamConfig(lr=1e-3, l2=0.1),
        rule=ConstantClip(max_norm=1e-3),
        sharding="table_wise",
        compared_at=(100, 301),
    ),
    "no floor, unusual betas": Stream(adam=AdamConfig(lr=1e-3, l2=1e-2, betas=(0.0, 0.0)), rule=CowClip(1.0, 0.0)),
    "no clip, no L2": Stream(adam=AdamConfig(lr=1e-2), rule=NoClip(), lr_factors={"t0": 0.0}),
    "weight decay": Stream(adam=AdamConfig(lr=1e-2, weight_decay=0.5), rule=NoClip(), gradients=1.0, steps=800),
    "FTRL": Stream(
        adam=AdamConfig(lr=1e-2, weight_decay=0.5, wide=FtrlConfig(0.3, 1e-2, batch_size=8)),
        lr_factors={"t0": 0.25},
        gradients=1.0,
        read_at=(320, 321),
    ),
    "paper": Stream(
        adam=AdamConfig(lr=1e-4, l2=1e-5, eps=1e-7, adam_epsilon="keras"),
        rule=ReferenceCowClip(1.0, 1e-5),
        gradients=1e-4,
    ),
    "weight decay and L2, a rate for each table": Stream(
        adam=AdamConfig(lr=1e-3, l2=1e-4, weight_decay=0.1),
        schedule=warm_up_then_cosine,
        lr_factors={"t0": 0.25, "t2": 4.0},
        read_at=(320, 321),
    ),
}


FIRST = ("absent rows are clipped", "FTRL", "weight decay and L2, a rate for each table")
SOON = (1, 17, 301)


@cache
def dense_oracle(name: str) -> tuple[dict[int, Tensors], Tensors]:
    """States of a stream's dense run at its own steps and SOON, which reading does not change; and the scales."""
    return train(replace(STREAMS[name], compared_at=(*STREAMS[name].compared_at, *SOON)), "dense")


@pytest.mark.parametrize("name", tiered(STREAMS, FIRST))
def test_replay_equals_the_dense_oracle(name: str) -> None:
    dense, scales = dense_oracle(name)
    replayed, _ = train(STREAMS[name], "replay")
    assert_close(replayed, {step: dense[step] for step in replayed}, scales)


@pytest.mark.thorough
@pytest.mark.parametrize(("longest", "rows"), [(600, 2), (10_000, 5)])
def test_rows_that_recur_after_many_steps(longest: int, rows: int) -> None:
    """Trains with the paper's settings: rows recur after 9 steps and more; rows that never occur decay."""
    steps, periods = longest + 700, (9, longest // 10, longest * 2 // 5, longest, 0)
    stream = replace(STREAMS["paper"], steps=steps, periods=periods, compared_at=(0, longest - 1, longest + 1))
    dense, scales = train(stream, "dense")
    replayed, _ = train(stream, "replay")
    assert_close(replayed, dense, scales)
    decayed = ~replayed[steps]["t2.weight"].any(1) & dense[0]["t2.weight"].any(1)
    assert decayed.sum() >= rows
    assert abs(dense[steps]["t2.weight"][decayed]).max() < 1e-11


@pytest.mark.parametrize("name", tiered(["FTRL", FIRST[-1], "paper", "weight decay"], FIRST))
def test_bit_identical_while_no_row_is_at_rest(name: str) -> None:
    """Under weight decay without L2 for good, since rows then go on step by step once their first moments are zero."""
    dense, _ = dense_oracle(name)
    replayed, _ = train(replace(STREAMS[name], compared_at=SOON), "replay")
    assert replayed.keys() == dense.keys()
    for step, state in dense.items():
        assert_equal(replayed[step], state)


def test_two_processes(tmp_path: Path) -> None:
    in_processes(_two_processes, (str(tmp_path),), 2)


def _two_processes(rank: int, folder: str) -> None:
    """Rows decay before they occur again in step 70."""
    adam = AdamConfig(lr=1e-2, l2=1e-3, betas=(0.5, 0.9), eps=1e-4, adam_epsilon="keras", wide=FtrlConfig(0.1))
    common = replace(STREAMS["clip binds"], adam=adam, periods=(1, 5, 17, 70, 0), steps=75, read_at=(40,))
    with process_group(rank, 2, folder):
        for sharding in ("row_wise", "table_wise,column_wise,data_parallel"):
            stream = replace(common, sharding=sharding, compared_at=(71,))
            dense, _ = train(stream, "dense")
            replayed, _ = train(stream, "replay")
            for step, state in dense.items() if rank == 0 else ():
                for key, expected in state.items():
                    # At this scale float32 rows have no finer steps.
                    np.testing.assert_allclose(replayed[step][key], expected, rtol=1e-6, atol=1e-11, err_msg=key)


def test_loaded_weights_count_as_current() -> None:
    stream = STREAMS["paper"]
    model = sharded_model(stream.problem)
    optimizer = EmbeddingAdam(model, replace(stream.adam, absent_rows="replay"))
    given = dict(model.state_dict().items())  # before rows fall behind, in the same memory
    for step in range(1, 50):
        model(stream.batch(step))[0].backward()
    for value in given.values():
        tensors_here(value)[0].fill_(0.25)
    model.load_state_dict(given)
    assert all((value == 0.25).all() for value in state_of(model).values())
    assert optimizer.steps == 49


@pytest.mark.parametrize("sharding", ["table_wise", "data_parallel"])
def test_set_steps_move_no_row(sharding: str) -> None:
    """The rows continue as under dense, with the bias corrections of the steps that were set."""
    stream, states = replace(STREAMS["paper"], sharding=sharding), []
    for absent_rows in ("dense", "replay"):
        model = sharded_model(stream.problem)
        optimizer = EmbeddingAdam(model, replace(stream.adam, absent_rows=absent_rows))
        for step in range(1, 60):
            if step == 30:
                optimizer.flush()
                optimizer.steps = 1000
            model(stream.batch(step))[0].backward()
        states.append(state_of(model, optimizer))
        optimizer.remove()
    assert_equal(*states)


@pytest.mark.parametrize("loaded", ["t0"])
def test_weights_loaded_while_rows_are_behind(loaded: str) -> None:
    """Some of them, as of a network alone, with no state_dict() before, which would bring all rows up to date."""
    states = []
    for absent_rows in ("dense", "replay"):
        model = sharded_model(STREAMS["paper"].problem)
        given = dict(sharded_model(STREAMS["paper"].problem).state_dict().items())
        optimizer = EmbeddingAdam(model, replace(STREAMS["paper"].adam, absent_rows=absent_rows))
        for step in range(1, 60):
            if step == 30:
                parts = {key: tensor for key, tensor in given.items() if key.split(".")[-2:][0] in loaded.split()}
                model.load_state_dict(parts, strict=False)
            model(STREAMS["paper"].batch(step))[0].backward()
        states.append(state_of(model, optimizer))
    assert_equal(*states)


@pytest.mark.parametrize(("loaded", "combined"), [("", True), ("t0", False)])
def test_moments_loaded_while_rows_are_behind(loaded: str, combined: bool) -> None:
    """As to begin with new moments: the weights stay, but for those of some tables that are loaded afterwards."""
    states = []
    for absent_rows in ("dense", "replay"):
        model = sharded_model(STREAMS["paper"].problem)
        given = dict(sharded_model(STREAMS["paper"].problem).state_dict().items())
        optimizer = EmbeddingAdam(model, replace(STREAMS["paper"].adam, absent_rows=absent_rows))
        other = sharded_model(STREAMS["paper"].problem)
        new = EmbeddingAdam(other, replace(STREAMS["paper"].adam, absent_rows=absent_rows)).state_dict()
        for step in range(1, 60):
            if step == 30:
                (CombinedOptimizer([optimizer]) if combined else optimizer).load_state_dict(new)
                if loaded:
                    parts = {key: tensor for key, tensor in given.items() if key.split(".")[-2:][0] == loaded}
                    model.load_state_dict(parts, strict=False)
            model(STREAMS["paper"].batch(step))[0].backward()
        states.append(state_of(model, optimizer))
    assert_equal(*states)


def test_an_id_outside_its_table_fails_the_forward_and_changes_no_row() -> None:
    stream = STREAMS["clip binds"]
    model = sharded_model(stream.problem)
    optimizer = EmbeddingAdam(model, replace(stream.adam, absent_rows="replay"))
    model(stream.batch(300))[0].backward()
    expected, drawn = state_of(model, optimizer), stream.drawn(300)
    drawn["b"][3] = (np.array([1, 5]), np.ones(2, np.float32))
    with pytest.raises(ValueError, match="id 5 is outside table 't1', which holds 5 rows"):
        model(batch_of(stream.problem, [drawn], 0, 8))
    assert_equal(state_of(model, optimizer), expected)


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.9, 0.0), (0.5, 0.0), (0.9, 2e3)])
def test_tiny_weights_shrink_at_rates_at_which_rows_rest(momentum: float, weight_decay: float) -> None:
    """The roots of Adam's recursion near zero, by numpy, are within the unit circle up to the rate and a tenth more."""
    config = AdamConfig(lr=0.0, betas=(momentum, 0.999), eps=1e-7, l2=1e-3, weight_decay=weight_decay)

    def radius(lr: float) -> float:
        d, a = lr * weight_decay, (1 - momentum) * 2 * config.l2 * lr / config.eps
        return float(np.abs(np.roots([1, -(1 - d + momentum - a), momentum * (1 - d)])).max())

    assert radius(converging_rate(config)) < 1 < radius(1.2 * converging_rate(config))
