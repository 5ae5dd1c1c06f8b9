"""Problems of drawing.py, trained by sharded TorchRec models in processes that take one after the other."""

import faulthandler
import logging
import multiprocessing
import os
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
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
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from cowrec.sparse_opt import CLIP_RULES, AdamConfig, ClipRule, EmbeddingAdam, FtrlConfig, attach_cowclip
from cowrec.sparse_opt.lookups.row_backends import TritonRows
from cowrec.sparse_opt.lookups.wrapped_lookup import WrappedLookup
from process_groups import process_group, start_in_processes
from random_problems.drawing import Collection, Problem, Rule, Table, refusals
from random_problems.in_loops import solve

CPU = torch.device("cpu")
FUSED_OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "fbgemm_adam": EmbOptimType.ADAM,
}
DTYPES = {"float32": DataType.FP32, "float16": DataType.FP16}
ANSWER_WITHIN = 240  # seconds, after numba has compiled
"""Time after which processes count as waiting for each other forever."""


@dataclass(frozen=True)
class Trained:
    """Outcome of a problem: tables and moments as in in_loops.py and statistics, or why it was refused."""

    state: dict[str, np.ndarray]
    stats: dict[str, tuple[int, float]]
    refusal: str = ""


class Trainers:
    """Processes that train problems within a context, one after the other; started anew after one has failed."""

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
                    answer = pipe.recv()
                    if isinstance(answer, str):
                        raise RuntimeError(f"rank {self._pipes.index(pipe)} failed:\n{answer}")
                    answers[pipe] = answer
        except BaseException:
            self.__exit__()
            raise
        return [answers[pipe] for pipe in self._pipes]

    def __enter__(self) -> "Trainers":
        return self

    def __exit__(self, *_: object) -> None:
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
        there = [pipe for _, pipe in pipes]
        self._processes = start_in_processes(_answer, [(self._world, self._folder.name, pipe) for pipe in there])
        for pipe in there:
            pipe.close()


def _answer(rank: int, world: int, folder: str, pipe: Connection) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(hosted(world))
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


def hosted(world: int) -> int:
    """Processes of a machine: four processes stand for two machines."""
    return min(2, world)


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
    for clipped in lookups_of(optimizer):
        run_on(problem.backend, clipped)
    optimizer.accumulate(problem.passes)
    dense = dense_optimizer(problem, model)
    batches = [[batch.to(device) for batch in of_step] for of_step in batches_of(problem)]
    pipeline: Any = TrainPipelineSparseDist(model, dense, device) if problem.pipelined else None
    stream = iter([batch for of_step in batches for batch in of_step])
    for step, of_step in enumerate(batches):
        if problem.is_adam:
            optimizer.lr = problem.lr * problem.rates[step % len(problem.rates)]
        for batch in of_step:
            if pipeline:
                pipeline.progress(stream)
            else:
                model(batch)[0].backward()
        if not pipeline:
            dense.step()
            dense.zero_grad()
        if problem.reads:
            _read(problem, model, batches[step - 1][0])
    stats = {
        name: (of_table.rows, of_table.clipped_share * of_table.rows) for name, of_table in optimizer.stats().items()
    }
    arrays = state_of(model, optimizer)
    optimizer.remove()
    return Trained(arrays if dist.get_rank() == 0 else {}, stats)


def train_step(problem: Problem, model: nn.Module, step: int) -> None:
    """Runs the backward passes of this rank's samples in a step, which update the fused tables."""
    for batch in batches_of(problem)[step]:
        model.module(batch.to(model.device))[0].backward()


def state_of(model: nn.Module, optimizer: Any = None) -> dict[str, np.ndarray]:
    """Gathers tables "c0.t0", and the moments "c0.t0.exp_avg" of EmbeddingAdam, on the first rank."""
    state = {}
    if isinstance(optimizer, EmbeddingAdam):
        moments = optimizer.state_dict()["state"].items()
        state = {
            f"{_name(key)}.{kind}": moment for key, own in moments for kind, moment in own.items() if "exp" in kind
        }
    state |= {_name(key): tensor for key, tensor in model.state_dict().items() if key.endswith(".weight")}
    return {key: gathered(tensor).copy() for key, tensor in sorted(state.items())}


def assert_equal(got: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(got[key], value, err_msg=key)


def _read(problem: Problem, model: nn.Module, batch: "_Batch") -> None:
    if not problem.pipelined:  # the pipeline's forward takes its own batches only
        model.eval()
        with torch.no_grad():
            model(batch)
        model.train()
    model.state_dict()


def _name(key: str) -> str:
    """ "c0.t0" from "c0.embedding_bags.t0.weight"."""
    *path, _, table = key.removesuffix(".weight").split(".")
    return ".".join([*path, table])


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
    common: dict[str, Any] = {"exclude": [problem.name(*place) for place in problem.exclude], "clip_columns": columns}
    if problem.is_adam:
        settings: dict[str, Any] = {"adam_epsilon": problem.adam_epsilon, "absent_rows": problem.optimizer}
        settings["weight_decay"] = problem.weight_decay
        settings["wide"] = FtrlConfig(*problem.wide, problem.batch) if problem.wide else None
        config = AdamConfig(problem.lr, problem.betas, problem.eps, l2=problem.l2, **settings)
        lr_factors = {problem.name(c, t): factor for c, t, factor in problem.lr_factors}
        return EmbeddingAdam(model, config, rule, lr_factors=lr_factors, **common)
    settings = {"single_id_bags": problem.single_id_bags, "l2": problem.l2, "verify": problem.steps}
    return attach_cowclip(model, rule, **settings, **common)


def dense_optimizer(problem: Problem, model: nn.Module) -> torch.optim.Optimizer:
    """Optimizer like the fused one, of the network and of tables that have none unless EmbeddingAdam trains them."""
    parameters = [
        parameter
        for key, parameter in in_backward_optimizer_filter(model.named_parameters())
        if not (problem.is_adam and ".embedding" in key)
    ]
    kinds: dict[str, Any] = {"adagrad": torch.optim.Adagrad, "rowwise_adagrad": RowWiseAdagrad}
    if problem.optimizer in kinds:
        return kinds[problem.optimizer](parameters, lr=problem.lr, eps=problem.eps)
    return torch.optim.SGD(parameters, lr=problem.lr)


class _Batch(Pipelineable):
    """Ids and output gradients of one backward pass, as TorchRec's pipeline takes them."""

    def __init__(self, ids: list[KeyedJaggedTensor], targets: dict[str, Tensor], divisor: int):
        self.ids, self.targets, self.divisor = ids, targets, divisor
        for c, own_ids in enumerate(ids):
            setattr(self, f"ids{c}", own_ids)

    def to(self, *device: Any, **settings: Any) -> "_Batch":
        ids = [tensor.to(*device, **settings) for tensor in self.ids]
        return _Batch(ids, {key: target.to(*device, **settings) for key, target in self.targets.items()}, self.divisor)

    def pin_memory(self) -> "_Batch":
        return self

    def record_stream(self, stream: Any) -> None:
        pass


class _Network(nn.Module):
    """Mean over the samples of sum(target * output), over all outputs of all collections."""

    def __init__(self, problem: Problem):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, 1))
        self.is_sequence = [collection.sequence for collection in problem.collections]
        self.outputs = [[output for *_, output in collection.outputs()] for collection in problem.collections]
        for c, collection in enumerate(problem.collections):
            self.add_module(f"c{c}", _unsharded(collection))

    def forward(self, batch: _Batch) -> tuple[Tensor, Tensor]:
        loss = self.bias.sum()
        for c, names in enumerate(self.outputs):
            outputs = getattr(self, f"c{c}")(getattr(batch, f"ids{c}"))
            for name in names:
                output = outputs[name].values() if self.is_sequence[c] else outputs[name]
                loss = loss + (output * batch.targets[f"c{c} {name}"]).sum() / batch.divisor
        return loss, loss.detach()


def sharded_model(
    problem: Problem,
    device: torch.device = CPU,
    fused_params: dict[str, Any] | None = None,
    env: ShardingEnv | None = None,
    prepare: Callable[[nn.Module], None] = lambda _: None,
) -> DistributedModelParallel:
    """Shards the problem's collections, by default over the default process group, and sets their initial values.

    ``prepare`` is called with each collection before.
    """
    optimizer = FUSED_OPTIMIZERS.get(problem.optimizer, FUSED_OPTIMIZERS["sgd"])
    fused_params = fused_params or {"optimizer": optimizer, "learning_rate": problem.lr, "eps": problem.eps}
    sharders: list[Any] = [kind(fused_params) for kind in (EmbeddingBagCollectionSharder, EmbeddingCollectionSharder)]
    network, plan = _Network(problem), {}
    for c, collection in enumerate(problem.collections):
        prepare(getattr(network, f"c{c}"))
        plan[f"c{c}"] = construct_module_sharding_plan(
            getattr(network, f"c{c}"),
            {f"t{t}": _generator(table, device, hosted(problem.world)) for t, table in enumerate(collection.tables)},
            sharder=sharders[collection.sequence],
            local_size=hosted(problem.world),
            world_size=problem.world,
            device_type=device.type,
        )
        for t, table in enumerate(collection.tables):
            if table.plan == "table_row_wise":
                plan[f"c{c}"][f"t{t}"].compute_kernel = "fused"  # its generator lacks the argument
    model = DistributedModelParallel(network, env, device, plan=ShardingPlan(plan=plan), sharders=sharders)
    initial = problem.initial()
    for key, value in model.state_dict().items():
        if key.endswith(".weight"):
            c, t = (int(part[1:]) for part in _name(key).split("."))
            set_to(value, torch.from_numpy(initial[c][t]))
    return model


def _generator(table: Table, device: torch.device, hosted: int) -> Any:
    """TorchRec's generator of a table's plan, or one of column shards and grids of any widths."""
    rank = table.shards[0][0]
    makers = {
        "table_wise": lambda: table_wise(rank, compute_kernel="fused"),
        "dense": lambda: table_wise(rank, compute_kernel="dense"),
        "uvm": lambda: table_wise(rank, compute_kernel="fused_uvm"),
        "cached": lambda: table_wise(rank, compute_kernel="fused_uvm_caching"),
        "row_wise": lambda: row_wise(compute_kernel="fused"),
        "table_row_wise": lambda: table_row_wise(host_index=rank // hosted),
        "data_parallel": data_parallel,
    }
    if table.plan in makers:
        return makers[table.plan]()
    parts = 2 if table.plan == "grid_shard" else 1  # rows of a column shard, on the ranks from its own on

    def plan(param: nn.Parameter, *_: Any) -> ParameterSharding:
        firsts = np.cumsum([0, *(columns for _, columns in table.shards)]).tolist()
        height = -(-table.rows // parts)
        shards, ranks = [], []
        for (first, (rank, columns)), part in product(zip(firsts, table.shards, strict=False), range(parts)):
            size = [min(height, table.rows - height * part), columns]
            shards.append(ShardMetadata([height * part, first], size, f"rank:{rank + part}/{device}"))
            ranks.append(rank + part)
        return ParameterSharding(table.plan, "fused", ranks, EnumerableShardingSpec(shards))

    return plan


def _unsharded(collection: Collection) -> EmbeddingBagCollection | EmbeddingCollection:
    kind: Any = EmbeddingConfig if collection.sequence else EmbeddingBagConfig
    tables = []
    for t, table in enumerate(collection.tables):
        more = {} if collection.sequence else {"pooling": PoolingType(table.pooling.upper())}
        more |= {"feature_names": list(table.features), "data_type": DTYPES[table.dtype]}
        tables.append(kind(name=f"t{t}", num_embeddings=table.rows, embedding_dim=table.dim, **more))
    if collection.sequence:
        return EmbeddingCollection(tables=tables, device=torch.device("meta"))
    return EmbeddingBagCollection(tables=tables, is_weighted=collection.weighted, device=torch.device("meta"))


def batches_of(problem: Problem) -> list[list[_Batch]]:
    """Batches of this rank's passes, [step][pass]."""
    of_rank = problem.passes * problem.pass_size
    first = dist.get_rank() * of_rank
    firsts = range(first, first + of_rank, problem.pass_size)
    return [[batch_of(problem, drawn, lo, lo + problem.pass_size) for lo in firsts] for drawn in problem.batches()]


def batch_of(problem: Problem, drawn: list[dict[str, Any]], lo: int, hi: int) -> _Batch:
    """Ids and output gradients of samples lo..hi-1 of a step."""
    ids, targets = [], {}
    for c, (collection, of_feature) in enumerate(zip(problem.collections, drawn, strict=True)):
        ids.append(_jagged(collection, [of_feature[feature][lo:hi] for feature in collection.features]))
        for _, name, output in collection.outputs():
            target, bags = of_feature[f"target {output}"][lo:hi], of_feature[name][lo:hi]
            if collection.sequence:
                target = np.repeat(target, [len(ids) for ids, _ in bags], axis=0)
                if collection.weighted:
                    target = target * np.concatenate([weights for _, weights in bags])[:, None]
            targets[f"c{c} {output}"] = torch.from_numpy(target)
    return _Batch(ids, targets, problem.passes * problem.pass_size)


def _jagged(collection: Collection, bags: Sequence[Sequence[tuple]]) -> KeyedJaggedTensor:
    """Bags (ids, weights) of each feature's samples, which may share them."""
    shares = [collection.samples_of_bag(name) for name in collection.features]
    own = [bag for samples, share in zip(bags, shares, strict=True) for bag in samples[::share]]
    weighted, variable = collection.weighted and not collection.sequence, {}
    if collection.variable_batch:
        bag_of_sample = torch.stack([torch.arange(len(bags[0])) // share for share in shares])
        sizes = [[len(bag[::share])] for bag, share in zip(bags, shares, strict=True)]
        variable = {"stride_per_key_per_rank": sizes, "inverse_indices": (collection.features, bag_of_sample)}
    return KeyedJaggedTensor(
        keys=collection.features,
        values=torch.from_numpy(np.concatenate([np.empty(0, np.int64), *(ids for ids, _ in own)])),
        weights=torch.from_numpy(np.concatenate([weights for _, weights in own])) if weighted else None,
        lengths=torch.tensor([len(ids) for ids, _ in own]),
        **variable,
    )


def gathered(value: ShardedTensor | Tensor) -> np.ndarray:
    """Gathers a sharded or replicated tensor, float32, on the first rank."""
    if not isinstance(value, ShardedTensor):
        return value.detach().float().cpu().numpy()
    device = value.local_shards()[0].tensor.device if value.local_shards() else None
    complete = torch.zeros(value.size(), dtype=value.dtype, device=device) if dist.get_rank() == 0 else None
    value.gather(0, complete)
    return np.empty(0) if complete is None else complete.float().cpu().numpy()


def set_to(value: ShardedTensor | Tensor, complete: Tensor) -> None:
    """Copies a complete table to the shards of this rank, or to a replicated tensor."""
    if not isinstance(value, ShardedTensor):
        value.detach().copy_(complete)
        return
    for shard in value.local_shards():
        (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        shard.tensor.detach().copy_(complete[row : row + rows, column : column + columns])


def lookups_of(attached: Any) -> list[WrappedLookup]:
    """Lookups of what attaching returned."""
    lookups: list[WrappedLookup] = attached._lookups
    return lookups


def run_on(backend: str, wrapped: WrappedLookup) -> None:
    """Gives a lookup another back end: "torch", or "triton", whose kernels Triton's interpreter runs on CPU."""
    if backend == "torch":
        wrapped.rows = wrapped.in_torch
    elif backend == "triton":
        wrapped.rows = TritonRows(wrapped.lookup, wrapped.layout, wrapped.limits, wrapped.statistics)


def assert_solved(problem: Problem, outcomes: Sequence[Trained]) -> None:
    """Checks what the processes of a problem trained, or with which messages they refused it."""
    expected = refusals(problem)
    for outcome in outcomes:
        if outcome.refusal:
            assert any(re.search(pattern, outcome.refusal) for pattern in expected), f"refused: {outcome.refusal}"
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
        of_ranks = [of_rank.stats[name] for of_rank in outcomes if (name := problem.name(c, t)) in of_rank.stats]
        rows, clipped = (sum(numbers) for numbers in zip(*of_ranks, strict=True))
        least, most = solution.clipped[f"c{c}.t{t}"]
        assert rows == solution.rows[f"c{c}.t{t}"], f"{rows} rows of c{c}.t{t}, not {solution.rows[f'c{c}.t{t}']}"
        assert least <= round(clipped) <= most, f"{clipped} clipped rows of c{c}.t{t}, not {least} to {most}"
