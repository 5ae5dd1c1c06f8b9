"""Random embedding problems, trained by a sharded TorchRec model in N processes and by plain loops in numpy."""

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
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
    ShardingType,
    ShardMetadata,
)
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.sparse_opt import EmbeddingAdam
from cowrec.sparse_opt.clipping.clipped_lookup import ClippedLookup
from cowrec.sparse_opt.clipping.row_backends import TritonRows
from process_groups import in_processes, process_group

FUSED_OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "fbgemm_adam": EmbOptimType.ADAM,
}
CPU = torch.device("cpu")
DTYPES = {torch.float32: DataType.FP32, torch.float16: DataType.FP16, torch.bfloat16: DataType.BF16}


def of_table(listed: str, table: int) -> str:
    """Picks the table's word from a comma-separated list, which repeats."""
    words = listed.split(",")
    return words[table % len(words)]


@dataclass(frozen=True)
class Case:
    """Tables with their rows and features, all of one width, and random bags for each step and sample."""

    seed: int = 0
    rows: tuple[int, ...] = (40, 7, 300)
    features: tuple[tuple[str, ...], ...] = (("a",), ("b",), ("c", "d"))  # table 2 is shared by two features
    dim: int = 8
    batch: int = 32  # a power of two, so that dividing by it rounds nothing
    steps: int = 3
    max_ids: int = 4  # per bag; 0 ids happen too
    weighted: bool = False
    pooling: str = "sum"  # or one for each table, comma-separated; likewise sharding
    sharding: str = "table_wise"
    optimizer: str = "sgd"
    lr: float = 0.1
    weight_scale: float = 0.05
    sequence: bool = False  # rows of ids, each multiplied by its weight, are summed outside of the collection
    variable_batch: bool = False  # one, two or four samples share a bag of a feature
    passes: int = 1  # backward passes of a step
    empty_half: bool = False  # the second half of the batch (rank 1 of 2) has no ids at all
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        return [name for names in self.features for name in names]

    def samples_of_bag(self, name: str) -> int:
        return 1 << self.keys.index(name) % 3 if self.variable_batch else 1

    def pooling_of(self, table: int) -> str:
        return of_table(self.pooling, table)

    def draw(self) -> dict[str, Any]:
        """Draws initial tables, and for each step bags [feature][sample] -> (ids, weights) and the output gradients."""
        rng = np.random.default_rng(self.seed)
        tables = []
        for rows in self.rows:
            table = rng.normal(0, self.weight_scale, (rows, self.dim)) * 10 ** rng.uniform(-3, 1, (rows, 1))
            table[::9] = 0
            tables.append(table.astype(np.float32))
        steps = []
        for _ in range(self.steps):
            bags, targets = {}, {}
            for t, names in enumerate(self.features):
                for name in names:
                    counts = rng.integers(0 if self.max_ids > 1 else 1, self.max_ids + 1, self.batch)
                    if self.empty_half:
                        counts[self.batch // 2 :] = 0
                    ids = [np.minimum(rng.zipf(1.3, n) - 1, self.rows[t] - 1).astype(np.int64) for n in counts]
                    bags[name] = [(i, rng.uniform(0.5, 2, len(i)).astype(np.float32)) for i in ids]
                    scale = 10 ** rng.uniform(-3, 1, (self.batch, 1))
                    targets[name] = (rng.normal(size=(self.batch, self.dim)) * scale).astype(np.float32)
            steps.append((bags, targets))
        return {"tables": tables, "steps": steps}


def row_gradients(case: Case, bags: dict, targets: dict, table: int) -> tuple[np.ndarray, np.ndarray]:
    """Computes the gradient of mean_b sum(target_b * pooled_b) for each row of a table, and its occurrences."""
    grads = np.zeros((case.rows[table], case.dim))
    counts = np.zeros(case.rows[table], int)
    for name in case.features[table]:
        share = case.samples_of_bag(name)
        for sample in range(case.batch):
            ids, weights = bags[name][sample // share * share]
            for i, weight in zip(ids, weights, strict=True):
                factor = float(weight) if case.weighted else 1.0
                if case.pooling_of(table) == "mean":
                    factor /= len(ids)
                grads[i] += factor * targets[name][sample].astype(np.float64) / case.batch
                counts[i] += sample % share == 0
    return grads, counts


Attach = Callable[[nn.Module, Case], Any]


def states_in_processes(cases: Sequence[tuple[Case, Attach]], world_size: int) -> list[dict[str, np.ndarray]]:
    """Trains each case; returns tables by name, and also moments where ``attach`` returns EmbeddingAdam."""
    with tempfile.TemporaryDirectory() as folder:
        if world_size == 1:
            _worker(0, 1, folder, cases)
        else:
            in_processes(_worker, (world_size, folder, cases), world_size)
        return [dict(np.load(Path(folder) / f"{i}.npz")) for i in range(len(cases))]


def sharded_model(
    case: Case,
    tables: list[np.ndarray],
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    fused_params: dict[str, Any] | None = None,
) -> DistributedModelParallel:
    """Shards the case's collection over the default process group and sets its initial values."""
    own = [
        (rows, case.dim, names, dtype, case.pooling_of(t))
        for t, (rows, names) in enumerate(zip(case.rows, case.features, strict=True))
    ]
    collection = unsharded_collection(own, sequence=case.sequence, weighted=case.weighted)
    fused = FUSED_OPTIMIZERS.get(case.optimizer, EmbOptimType.EXACT_SGD)
    fused_params = fused_params or {"optimizer": fused, "learning_rate": case.lr, "eps": 1e-8}
    kind_of_sharder = EmbeddingCollectionSharder if case.sequence else EmbeddingBagCollectionSharder
    sharder: Any = kind_of_sharder(fused_params=fused_params)
    world = dist.get_world_size()
    make_kind: dict[str, Callable[[int], Any]] = {
        "row_wise": lambda t: row_wise(compute_kernel="fused"),
        "table_wise": lambda t: table_wise(rank=t % world, compute_kernel="fused"),
        "uvm": lambda t: table_wise(rank=t % world, compute_kernel="fused_uvm"),
        "cached": lambda t: table_wise(rank=t % world, compute_kernel="fused_uvm_caching"),
        # One process holds both shards; of two each holds both tables; of four two hold each table.
        "column_wise": lambda t: column_wise(ranks=[t % world, (t + 1) % world], compute_kernel="fused"),
        "columns_of_one_rank": lambda t: column_wise(ranks=[t % world] * 2, compute_kernel="fused"),
        "table_row_wise": lambda t: table_row_wise(host_index=t % 2 if world == 4 else 0),
        "grid": lambda t: on_a_grid(t % 2),
        "data_parallel": lambda t: data_parallel(),
    }
    kinds = {f"t{t}": make_kind[of_table(case.sharding, t)](t) for t in range(len(case.rows))}
    local = min(2, world)  # four processes stand for two machines
    plan = construct_module_sharding_plan(
        collection, kinds, sharder=sharder, local_size=local, world_size=world, device_type=device.type
    )
    for table in plan.values():
        if table.sharding_type == ShardingType.TABLE_ROW_WISE.value:
            table.compute_kernel = "fused"  # its generator lacks the argument
    model = DistributedModelParallel(
        nn.ModuleDict({"ebc": collection}),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=ShardingPlan(plan={"ebc": plan}),
        sharders=[sharder],
    )
    load_tables(model, lambda key: tables[int(key.split(".")[-2][1:])])
    return model


def load_tables(model: nn.Module, table_of: Callable[[str], np.ndarray]) -> None:
    """Sets the tables of a sharded model; ``table_of(key)`` is the complete table of a key of its state."""
    for key, value in model.state_dict().items():
        if not key.endswith(".weight"):
            continue
        full = torch.from_numpy(table_of(key))
        if not isinstance(value, ShardedTensor):  # data-parallel
            value.detach().copy_(full)
            continue
        for shard in value.local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.detach().copy_(full[row : row + rows, column : column + columns])


def unsharded_collection(
    tables: Sequence[tuple[int, int, Sequence[str], torch.dtype, str]], *, sequence: bool, weighted: bool
) -> EmbeddingBagCollection | EmbeddingCollection:
    """A collection on the meta device, of tables t0, t1 ... by (rows, columns, features, dtype, pooling)."""
    kind: Any = EmbeddingConfig if sequence else EmbeddingBagConfig
    configs = [
        kind(
            name=f"t{t}",
            num_embeddings=rows,
            embedding_dim=dim,
            feature_names=list(features),
            data_type=DTYPES[dtype],
            **({} if sequence else {"pooling": PoolingType(pooling.upper())}),
        )
        for t, (rows, dim, features, dtype, pooling) in enumerate(tables)
    ]
    if sequence:
        return EmbeddingCollection(tables=configs, device=torch.device("meta"))
    return EmbeddingBagCollection(tables=configs, is_weighted=weighted, device=torch.device("meta"))


def on_a_grid(first: int) -> Callable[..., ParameterSharding]:
    """Plans two hosts of two processes, with half of the columns each; TorchRec's plan splits wide tables only."""

    def plan(param: nn.Parameter, *_: Any) -> ParameterSharding:
        rows, columns = param.shape
        half = (rows + 1) // 2
        ranks = [2 * (host ^ first) + rank for host in range(2) for rank in range(2)]
        shards = [
            ShardMetadata(
                [half * (rank % 2), columns // 2 * (number // 2)],
                [rows - half if rank % 2 else half, columns // 2],
                f"rank:{rank}/{param.device if param.device.type != 'meta' else CPU}",
            )
            for number, rank in enumerate(ranks)
        ]
        spec = EnumerableShardingSpec(shards)
        return ParameterSharding(ShardingType.GRID_SHARD.value, "fused", ranks, spec)

    return plan


def batch_of(case: Case, bags: dict, lo: int, hi: int) -> KeyedJaggedTensor:
    weighted = case.weighted and not case.sequence
    shares = [case.samples_of_bag(name) for name in case.keys] if case.variable_batch else None
    return jagged_of(case.keys, [bags[name][lo:hi] for name in case.keys], weighted=weighted, shares=shares)


def jagged_of(
    keys: list[str], bags: Sequence[Sequence[tuple]], *, weighted: bool, shares: Sequence[int] | None
) -> KeyedJaggedTensor:
    """Ids of each key's samples (ids, weights); in a variable batch ``shares`` samples of a key have one bag."""
    own = [each[:: shares[k] if shares else 1] for k, each in enumerate(bags)]
    variable: dict[str, Any] = {}
    if shares:
        bag_of_sample = [torch.arange(len(bags[0])) // share for share in shares]
        variable = {
            "stride_per_key_per_rank": [[len(bag)] for bag in own],
            "inverse_indices": (keys, torch.stack(bag_of_sample)),
        }
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.from_numpy(np.concatenate([ids for bag in own for ids, _ in bag] or [np.empty(0, np.int64)])),
        weights=torch.from_numpy(np.concatenate([w for bag in own for _, w in bag])) if weighted else None,
        lengths=torch.tensor([len(ids) for bag in own for ids, _ in bag]),
        **variable,
    )


def gather_tables(case: Case, model: nn.Module) -> list[np.ndarray]:
    """Gathers the complete tables on the first rank."""
    state = model.state_dict()
    tables = "embeddings" if case.sequence else "embedding_bags"
    return [gathered(state[f"ebc.{tables}.t{t}.weight"]) for t in range(len(case.rows))]


def gathered(value: ShardedTensor | torch.Tensor) -> np.ndarray:
    """Gathers a sharded or replicated tensor, float32, on the first rank."""
    if not isinstance(value, ShardedTensor):
        return value.detach().float().cpu().numpy()
    device = value.local_shards()[0].tensor.device if value.local_shards() else None
    complete = torch.zeros(value.size(), dtype=value.dtype, device=device) if dist.get_rank() == 0 else None
    value.gather(0, complete)
    return np.empty(0) if complete is None else complete.float().cpu().numpy()


def moments_of(optimizer: EmbeddingAdam) -> dict[str, np.ndarray]:
    """Gathers the moments on the first rank, by "t0.exp_avg" and so on."""
    return {key: gathered(value) for key, value in moments(optimizer).items()}


def moments(optimizer: EmbeddingAdam) -> dict[str, ShardedTensor | torch.Tensor]:
    """Returns the moments by "<table>.exp_avg" and so on."""
    return {
        f"{key.split('.')[-2]}.{name}": value
        for key, own in optimizer.state_dict()["state"].items()
        for name, value in own.items()
        if "exp_avg" in name
    }


def lookups_of(attached: Any) -> list[ClippedLookup]:
    """Lookups of what attaching returned."""
    return [adam.clipped for adam in attached.lookups] if isinstance(attached, EmbeddingAdam) else attached._lookups


def run_on(backend: str, clipped: ClippedLookup) -> None:
    """Gives a lookup another back end: "torch", or "triton", whose kernels Triton's interpreter runs on CPU."""
    if backend == "torch":
        clipped.rows = clipped.in_torch
    elif backend == "triton":
        clipped.rows = TritonRows(clipped.lookup, clipped.layout, clipped.limits, clipped.statistics)


def train_step(case: Case, model: nn.Module, bags: dict, targets: dict, lo: int, hi: int) -> None:
    """Runs the backward of the mean over samples lo..hi-1 of sum(target * pooled), which updates the fused tables."""
    size = (hi - lo) // case.passes
    for first in range(lo, hi, size):
        (loss_of(case, model, bags, targets, first, first + size) / case.passes).backward()


def loss_of(case: Case, model: nn.Module, bags: dict, targets: dict, lo: int, hi: int) -> torch.Tensor:
    """Mean over samples lo..hi-1 of sum(target * pooled)."""
    device = model.device
    looked_up = model.module["ebc"](batch_of(case, bags, lo, hi).to(device)).wait()
    losses = []
    for name, output in (looked_up if case.sequence else looked_up.to_dict()).items():
        target = targets[name][lo:hi]
        if case.sequence:
            target = np.repeat(target, [len(ids) for ids, _ in bags[name][lo:hi]], axis=0)
            if case.weighted:
                target = target * np.concatenate([weights for _, weights in bags[name][lo:hi]])[:, None]
            output = output.values()
        losses.append((output * torch.from_numpy(target).to(device)).sum())
    return torch.stack(losses).sum() / (hi - lo)


def dense_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer | None:
    """The case's optimizer of tables that have no fused one; None without such tables."""
    parameters = [each for _, each in in_backward_optimizer_filter(model.named_parameters())]
    return dense_like(case.optimizer, parameters, case.lr, 1e-8) if parameters else None


def dense_like(fused: str, parameters: list[nn.Parameter], lr: float, eps: float) -> torch.optim.Optimizer:
    """The dense optimizer that is like a fused one; SGD for Adam, which trains its tables itself."""
    kinds: dict[str, Any] = {"adagrad": torch.optim.Adagrad, "rowwise_adagrad": RowWiseAdagrad}
    return kinds[fused](parameters, lr=lr, eps=eps) if fused in kinds else torch.optim.SGD(parameters, lr=lr)


def _worker(rank: int, world_size: int, folder: str, cases: Sequence[tuple[Case, Attach]]) -> None:
    if world_size > 1:
        os.environ["LOCAL_WORLD_SIZE"] = str(min(2, world_size))
    with process_group(rank, world_size, folder):
        for number, (case, attach) in enumerate(cases):
            drawn = case.draw()
            model = sharded_model(case, drawn["tables"])
            optimizer = attach(model, case)
            if case.passes > 1:
                optimizer.accumulate(case.passes)
            lo, hi = rank * case.batch // world_size, (rank + 1) * case.batch // world_size
            is_adam = isinstance(optimizer, EmbeddingAdam)
            dense = None if is_adam else dense_optimizer(case, model)
            for bags, targets in drawn["steps"]:
                train_step(case, model, bags, targets, lo, hi)
                if dense:
                    dense.step()
                    dense.zero_grad()
            if is_adam:
                optimizer.flush()
            state = {f"t{t}": table for t, table in enumerate(gather_tables(case, model))}
            if is_adam:
                state |= moments_of(optimizer)
            if rank == 0:
                np.savez(Path(folder) / f"{number}.npz", **state)
