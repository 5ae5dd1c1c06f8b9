"""Problems of drawing.py, trained by sharded TorchRec models in processes that take one after the other."""

import faulthandler
import logging
import multiprocessing
import os
import re
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import (
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
    ShardMetadata,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from cowrec.sparse_opt import CLIP_RULES, AdamConfig, ClipRule, EmbeddingAdam, attach_cowclip
from process_groups import process_group, start_in_processes
from random_problems.drawing import Collection, Problem, Rule, Table, refusals
from random_problems.in_loops import solve
from sharded_case import (
    CPU,
    FUSED_OPTIMIZERS,
    dense_like,
    gathered,
    jagged_of,
    load_tables,
    lookups_of,
    run_on,
    unsharded_collection,
)

ANSWER_WITHIN = 240  # seconds, after numba has compiled
"""Time after which processes count as waiting for each other forever."""


@dataclass(frozen=True)
class Trained:
    """Outcome of a problem: tables and moments as in in_loops.py and statistics, or why it was refused."""

    state: dict[str, np.ndarray]
    stats: dict[str, tuple[int, float]]
    refusal: str = ""


class Trainers:
    """Processes that train problems, one after the other; they are started anew after one has failed."""

    def __init__(self, world: int):
        self._world = world
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: Any = None

    def train(self, problem: Problem) -> list[Trained]:
        """Trains a problem; returns the outcome of each process.

        Raises:
            RuntimeError: a process fails, ends, or does not answer.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send(problem)
        answers: dict[Connection, Trained] = {}
        try:
            while missing := [pipe for pipe in self._pipes if pipe not in answers]:
                ready = wait(missing, ANSWER_WITHIN)
                if not ready:
                    raise RuntimeError(f"ranks {[self._pipes.index(pipe) for pipe in missing]} do not answer")
                for pipe in ready:
                    assert isinstance(pipe, Connection)
                    answer = pipe.recv()
                    if isinstance(answer, str):
                        raise RuntimeError(f"rank {self._pipes.index(pipe)} failed:\n{answer}")
                    answers[pipe] = answer
        except BaseException:
            self.stop()
            raise
        return [answers[pipe] for pipe in self._pipes]

    def stop(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder:
            self._folder.cleanup()
        self._processes, self._pipes, self._folder = [], [], None

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        pipes = [multiprocessing.Pipe() for _ in range(self._world)]
        self._pipes = [here for here, _ in pipes]
        there = [each for _, each in pipes]
        self._processes = start_in_processes(_answer, [(self._world, self._folder.name, each) for each in there])
        for each in there:
            each.close()


@contextmanager
def trainers(world: int) -> Iterator[Trainers]:
    """Processes, which end with the context."""
    found = Trainers(world)
    try:
        yield found
    finally:
        found.stop()


def _answer(rank: int, world: int, folder: str, pipe: Connection) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # of torch.fx and TorchRec, for every problem
    with process_group(rank, world, folder):
        while True:
            problem = pipe.recv()
            faulthandler.dump_traceback_later(0.5 * ANSWER_WITHIN)
            try:
                pipe.send(train(problem))
            except BaseException:
                pipe.send(traceback.format_exc())
            faulthandler.cancel_dump_traceback_later()


def train(problem: Problem, device: torch.device = CPU) -> Trained:
    """Trains a problem in this process, over the default group."""
    model = sharded_model(problem, device)
    optimizer, refusal = None, ""
    try:
        optimizer = attached(problem, model)
    except ValueError as error:
        refusal = f"{type(error).__name__}: {error}"
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, refusal)
    if any(of_ranks):
        assert all(of_ranks), f"refused by some ranks alone: {of_ranks}"
        return Trained({}, {}, max(of_ranks))
    assert optimizer is not None
    for clipped in lookups_of(optimizer):
        run_on(problem.backend, clipped)
    optimizer.accumulate(problem.passes)
    dense = _dense_optimizer(problem, model)
    batches = [[each.to(device) for each in _batches(problem, drawn)] for drawn in problem.batches()]
    pipeline: Any = TrainPipelineSparseDist(model, dense, device) if problem.pipelined else None
    stream = iter([each for of_step in batches for each in of_step])
    for step, of_step in enumerate(batches):
        if problem.is_adam:
            optimizer.lr = problem.lr * problem.rates[step % len(problem.rates)]
        for each in of_step:
            if pipeline:
                pipeline.progress(stream)
            else:
                model(each)[0].backward()
        if not pipeline:
            dense.step()
            dense.zero_grad()
        if problem.reads:
            _read(problem, model, batches[step - 1][0])
    stats = {name: (each.rows, each.clipped * each.rows) for name, each in optimizer.stats().items()}
    state = {}
    if problem.is_adam:
        moments = optimizer.state_dict()["state"].items()
        state = {f"{_name(key)}.{kind}": each for key, own in moments for kind, each in own.items() if "exp" in kind}
    state |= {_name(key): each for key, each in model.state_dict().items() if key.endswith(".weight")}
    arrays = {key: gathered(each) for key, each in sorted(state.items())}
    optimizer.remove()
    return Trained(arrays if dist.get_rank() == 0 else {}, stats)


def _read(problem: Problem, model: nn.Module, batch: "_Batch") -> None:
    if not problem.pipelined:  # the pipeline's forward takes its own batches only
        model.eval()
        with torch.no_grad():
            model(batch)
        model.train()
    model.state_dict()


def _name(key: str) -> str:
    """ "c0.t0" from "c0.embedding_bags.t0.weight"."""
    collection, _, table, *_ = key.removesuffix(".weight").split(".")
    return f"{collection}.{table}"


def attached(problem: Problem, model: nn.Module) -> Any:
    """Attaches what the problem names."""

    def made(rule: Rule) -> ClipRule:
        return CLIP_RULES[rule[0]](**rule[1])

    rule: Any = made(problem.rule)
    if problem.own_rules:
        rule = {"*": rule} | {problem.name(c, t): made(own) for c, t, own in problem.own_rules}
    columns: Any = problem.clip_columns
    if isinstance(columns, tuple):
        columns = {problem.name(c, t): width for c, t, width in columns}
    common: dict[str, Any] = {"exclude": [problem.name(*each) for each in problem.exclude], "clip_columns": columns}
    if problem.is_adam:
        settings: dict[str, Any] = {"adam_epsilon": problem.adam_epsilon, "absent_rows": problem.optimizer}
        settings["weight_decay"] = problem.weight_decay
        config = AdamConfig(problem.lr, problem.betas, problem.eps, l2=problem.l2, **settings)
        lr_factors = {problem.name(c, t): factor for c, t, factor in problem.lr_factors}
        return EmbeddingAdam(model, config, rule, lr_factors=lr_factors, **common)
    return attach_cowclip(model, rule, single_id_bags=problem.single_id_bags, l2=problem.l2, **common)


def _dense_optimizer(problem: Problem, model: nn.Module) -> torch.optim.Optimizer:
    """Optimizer of the network, and of the tables that have no fused one unless EmbeddingAdam trains them."""
    parameters = [
        each
        for key, each in in_backward_optimizer_filter(model.named_parameters())
        if not (problem.is_adam and ".embedding" in key)
    ]
    return dense_like(problem.optimizer, parameters, problem.lr, problem.eps)


class _Batch(Pipelineable):
    """Ids and output gradients of one backward pass, as TorchRec's pipeline takes them."""

    def __init__(self, ids: list[KeyedJaggedTensor], targets: dict[str, Tensor], divisor: int):
        self.ids, self.targets, self.divisor = ids, targets, divisor
        for c, each in enumerate(ids):
            setattr(self, f"ids{c}", each)

    def to(self, *device: Any, **settings: Any) -> "_Batch":
        ids = [each.to(*device, **settings) for each in self.ids]
        return _Batch(ids, {key: each.to(*device, **settings) for key, each in self.targets.items()}, self.divisor)

    def pin_memory(self) -> "_Batch":
        return self

    def record_stream(self, stream: Any) -> None:
        pass


class _Network(nn.Module):
    """Mean over the samples of sum(target * output), over all outputs of all collections."""

    def __init__(self, problem: Problem):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, 1))
        self.is_sequence = [each.sequence for each in problem.collections]
        self.outputs = [[output for *_, output in each.outputs()] for each in problem.collections]
        for c, each in enumerate(problem.collections):
            self.add_module(f"c{c}", _unsharded(each))

    def forward(self, batch: _Batch) -> tuple[Tensor, Tensor]:
        loss = self.bias.sum()
        for c, names in enumerate(self.outputs):
            outputs = getattr(self, f"c{c}")(getattr(batch, f"ids{c}"))
            for name in names:
                output = outputs[name].values() if self.is_sequence[c] else outputs[name]
                loss = loss + (output * batch.targets[f"c{c} {name}"]).sum() / batch.divisor
        return loss, loss.detach()


def sharded_model(problem: Problem, device: torch.device) -> DistributedModelParallel:
    """Shards the problem's collections over the default process group and sets their initial values."""
    optimizer = FUSED_OPTIMIZERS.get(problem.optimizer, FUSED_OPTIMIZERS["sgd"])
    fused_params = {"optimizer": optimizer, "learning_rate": problem.lr, "eps": problem.eps}
    sharders: list[Any] = [kind(fused_params) for kind in (EmbeddingBagCollectionSharder, EmbeddingCollectionSharder)]
    network, plan = _Network(problem), {}
    for c, collection in enumerate(problem.collections):
        module = getattr(network, f"c{c}")
        generators = {f"t{t}": _generator(each, device) for t, each in enumerate(collection.tables)}
        plan[f"c{c}"] = construct_module_sharding_plan(
            module,
            generators,
            sharder=sharders[collection.sequence],
            local_size=problem.world,
            world_size=problem.world,
            device_type=device.type,
        )
        for t, each in enumerate(collection.tables):
            if each.plan == "table_row_wise":
                plan[f"c{c}"][f"t{t}"].compute_kernel = "fused"  # its generator lacks the argument
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    model = DistributedModelParallel(network, env=env, device=device, plan=ShardingPlan(plan=plan), sharders=sharders)
    initial = problem.initial()

    def table_of(key: str) -> np.ndarray:
        c, t = (int(each[1:]) for each in _name(key).split("."))
        return initial[c][t]

    load_tables(model, table_of)
    return model


def _generator(table: Table, device: torch.device) -> Any:
    rank = table.shards[0][0]
    if table.plan != "column_wise":
        makers = {
            "table_wise": lambda: table_wise(rank, compute_kernel="fused"),
            "dense": lambda: table_wise(rank, compute_kernel="dense"),
            "row_wise": lambda: row_wise(compute_kernel="fused"),
            "table_row_wise": lambda: table_row_wise(host_index=0),
            "data_parallel": data_parallel,
        }
        return makers[table.plan]()

    def plan(param: nn.Parameter, *_: Any) -> ParameterSharding:
        firsts = np.cumsum([0, *(columns for _, columns in table.shards)]).tolist()
        shards = [
            ShardMetadata([0, first], [table.rows, columns], f"rank:{rank}/{device}")
            for first, (rank, columns) in zip(firsts, table.shards, strict=False)
        ]
        ranks = [rank for rank, _ in table.shards]
        return ParameterSharding("column_wise", "fused", ranks, EnumerableShardingSpec(shards))

    return plan


def _unsharded(collection: Collection) -> EmbeddingBagCollection | EmbeddingCollection:
    tables = [
        (each.rows, each.dim, each.features, getattr(torch, each.dtype), each.pooling) for each in collection.tables
    ]
    return unsharded_collection(tables, sequence=collection.sequence, weighted=collection.weighted)


def _batches(problem: Problem, drawn: list[dict[str, Any]]) -> list[_Batch]:
    """Batches of this rank's passes of a step."""
    first = dist.get_rank() * problem.passes * problem.pass_size
    starts = range(first, first + problem.passes * problem.pass_size, problem.pass_size)
    return [_batch(problem, drawn, lo, lo + problem.pass_size) for lo in starts]


def _batch(problem: Problem, drawn: list[dict[str, Any]], lo: int, hi: int) -> _Batch:
    ids, targets = [], {}
    for c, (collection, of_feature) in enumerate(zip(problem.collections, drawn, strict=True)):
        names, weighted = collection.features, collection.weighted and not collection.sequence
        shares = [collection.samples_of_bag(name) for name in names] if collection.variable_batch else None
        ids.append(jagged_of(names, [of_feature[each][lo:hi] for each in names], weighted=weighted, shares=shares))
        for _, name, output in collection.outputs():
            target, bags = of_feature[f"target {output}"][lo:hi], of_feature[name][lo:hi]
            if collection.sequence:
                target = np.repeat(target, [len(each) for each, _ in bags], axis=0)
                if collection.weighted:
                    target = target * np.concatenate([weights for _, weights in bags])[:, None]
            targets[f"c{c} {output}"] = torch.from_numpy(target)
    return _Batch(ids, targets, problem.pass_size * problem.passes)


def assert_solved(problem: Problem, outcomes: Sequence[Trained]) -> None:
    """Checks what the processes of a problem trained, or with which messages they refused it."""
    expected = refusals(problem)
    for outcome in outcomes:
        if outcome.refusal:
            assert any(re.search(each, outcome.refusal) for each in expected), f"refused: {outcome.refusal}"
        else:
            assert not expected, f"not refused: {expected}"
    if expected:
        return
    solution = solve(problem)
    state = outcomes[0].state
    assert state.keys() == solution.state.keys()
    for key, value in solution.state.items():
        error = (np.abs(state[key] - value) / solution.tolerance[key]).max()
        assert error <= 1, f"{key} differs by {error:.3g} times the tolerance"
    for c, t, _ in problem.tables():
        of_ranks = [each.stats[name] for each in outcomes if (name := problem.name(c, t)) in each.stats]
        rows, clipped = (sum(each) for each in zip(*of_ranks, strict=True))
        least, most = solution.clipped[f"c{c}.t{t}"]
        assert rows == solution.rows[f"c{c}.t{t}"], f"{rows} rows of c{c}.t{t}, not {solution.rows[f'c{c}.t{t}']}"
        assert least <= round(clipped) <= most, f"{clipped} clipped rows of c{c}.t{t}, not {least} to {most}"
