"""Construction of a run's sharded model: its network with the loss, the sharding plan, tables and their optimizer.

`[sharding]` sets a kind for all tables or for single ones. "auto" leaves the choice to TorchRec's planner on several
GPUs, where it knows the speed of the links; on CPU tables are balanced by their bytes.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CounterWeightDecayMode,
    CowClipDefinition,
    WeightDecayMode,
)
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from cowrec.errors import UserError
from cowrec.models import build_model, l2_kernels, loss_of
from cowrec.models.front import EmbeddingFront
from cowrec.models.linear_relu import BY_ONE_DNN
from cowrec.sparse_opt import (
    AdamConfig,
    EmbeddingAdam,
    Hyperparameters,
    LookupsHandle,
    attach_cowclip,
)
from cowrec.sparse_opt.tbe.collection import look_up_directly, set_initial_rates

from ..config.run import RunConfig
from ..config.sections import OptimizerConfig
from ..runtime.processes import Process
from .run_plan import (
    BY_ROWS,
    FOUR_COLUMNS,
    TABLE_OPTIMIZERS,
    RunPlan,
    Scaled,
    TableSpec,
    by_table,
    shown_name,
    table_bytes,
)
from .step import MeanLoss, TrainTask

_logger = logging.getLogger(__name__)
SHARDING = "sharding.json"
"""File in the folder of a run with what :func:`describe_sharding` returns."""
_BLOCK_ROWS = 1 << 12


def build_sharded(plan: RunPlan) -> DistributedModelParallel:
    """Builds the run's :class:`TrainTask` and shards it; initial values depend on the seed, not on the sharding.

    Raises UserError if TorchRec's planner cannot fit the tables, or a setting does not suit the network.
    """
    config = plan.config
    set_product_precision(config.train.precision, plan.process.device)
    sharded = shard(unsharded_task(plan), plan)
    fill_tables(sharded, plan.tables, config.optimizer.embedding_init_std, config.train.seed)
    if plan.process.world_size > 1:  # building the network took the same random numbers everywhere
        seed_process(config.train.seed, plan.process)
    return sharded


def seed_process(seed: int, process: Process, step: int = 0) -> None:
    """Gives this process random numbers of its own from a step on, such as those of dropout."""
    own = np.random.SeedSequence([seed, step, process.rank]).generate_state(1, np.uint64)
    torch.manual_seed(int(own[0]))


def random_state(process: Process) -> dict[str, Any]:
    """Returns the state of this process's random generators, keyed by its rank."""
    state = {"cpu": torch.get_rng_state()}
    if process.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(process.device)
    return {f"random_{process.rank}_of_{process.world_size}": state}


def unsharded_task(plan: RunPlan) -> TrainTask:
    """Builds the run's model with its loss; its tables are on the meta device."""
    config, schema, process = plan.config, plan.schema, plan.process
    torch.manual_seed(config.train.seed)
    model = build_model(
        config.model,
        plan.bags,
        len(schema.dense),
        is_weighted=schema.is_weighted,
        fields=[field.name for field in schema.sparse],
        sequences=schema.sequences,
        num_tasks=len(schema.labels),
        device=torch.device("meta"),
    )
    check_network(model, config, process)
    loss_of_sample = loss_of(config.train.loss, config.train.loss_options, len(schema.labels))
    train = schema.splits.get("train")
    mean_weight = train.weight / train.rows if train and train.weight else 1.0
    task_weights = [config.train.task_weights.get(name, 1.0) for name in schema.labels]
    return train_task(model, plan, MeanLoss(process.world_size, loss_of_sample, mean_weight, task_weights))


def check_network(model: nn.Module, config: RunConfig, process: Process) -> None:
    """Raises UserError for settings that only the built network shows to be wrong."""
    if config.optimizer.cross_l2 and not l2_kernels(model)["cross"]:
        raise UserError(
            f"optimizer.cross_l2 = {config.optimizer.cross_l2:g} is for cross layers, CIN and AutoInt, of which"
            f" {type(model).__name__} has none; leave it out"
        )
    for path, module in model.named_modules() if process.world_size > 1 else ():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise UserError(
                f'model.name = "{config.model.name}" has a {type(module).__name__} ({path}), whose means leave out'
                " samples of other processes, or take in padding, and depend on their number; use LayerNorm, or one"
                " process"
            )


def check_batches(model: nn.Module, plan: RunPlan) -> None:
    """Raises UserError for batches of a single sample, or a part of one, of a network that normalises them."""
    train, rows = plan.config.train, plan.train_rows
    for samples in (min(train.batch_size, rows), rows % train.batch_size):
        if 0 < samples < 2 * train.accumulation and has_batch_norm(model):
            raise UserError(
                f'model.name = "{plan.config.model.name}" has batch normalisation, which cannot train on a single'
                f" sample, as there would be in a batch of {samples}: {rows:,} training samples in batches of"
                f" {train.batch_size} (train.batch_size), in {train.accumulation} parts each (train.accumulation);"
                " choose another batch size"
            )


def has_batch_norm(model: nn.Module) -> bool:
    """Tells whether a network has batch normalisation, which cannot train on a single sample."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def train_task(model: nn.Module, plan: RunPlan, loss: MeanLoss | None = None) -> TrainTask:
    """Combines a model with its loss, by default the mean cross-entropy.

    The model is ``forward(dense, sparse) -> logits [B]``, with one EmbeddingBagCollection on the meta device.
    """
    config, process = plan.config, plan.process
    bfloat16_device = process.device.type if config.train.precision == "bfloat16" else ""
    values, factors = plan.scaled.hyperparameters, by_table(config.optimizer.embedding_lr_factors)
    task = TrainTask(model, loss or MeanLoss(process.world_size), values.l2, config.optimizer.cross_l2, bfloat16_device)
    if config.optimizer.embedding != "adam":
        set_initial_rates(task, {table: factor * values.embedding_lr for table, factor in factors.items()})
    return task


def shard(task: nn.Module, plan: RunPlan) -> DistributedModelParallel:
    """Shards the tables of a module over the process group. Raises UserError if TorchRec's planner cannot fit them."""
    config, process = plan.config, plan.process
    sharder = EmbeddingBagCollectionSharder(fused_params=fused_params(config.optimizer, plan.scaled.hyperparameters))
    sharded = DistributedModelParallel(
        task,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=process.device,
        plan=sharding_plan(task, plan.kinds, config, process, sharder),
        sharders=[sharder],
        init_data_parallel=process.world_size > 1,
    )
    if process.world_size == 1:  # no gradients to reduce, and no ids and rows to exchange
        sharded.to(process.device)
        look_up_directly(sharded)
    return sharded


def fused_params(optimizer: OptimizerConfig, hyperparameters: Hyperparameters) -> dict[str, Any]:
    """Returns the settings of FBGEMM's fused optimizer, as TorchRec passes them to the tables."""
    params: dict[str, Any] = {
        "optimizer": TABLE_OPTIMIZERS[optimizer.embedding][1],
        "learning_rate": hyperparameters.embedding_lr,
        "eps": hyperparameters.eps,
        "bounds_check_mode": BoundsCheckMode.FATAL,
    }
    if optimizer.embedding == "fbgemm_adam":
        params |= dict(zip(("beta1", "beta2"), hyperparameters.betas, strict=True))
    if optimizer.embedding == "fbgemm_cowclip":
        params["weight_decay_mode"] = WeightDecayMode.COWCLIP
        params["cowclip_regularization"] = CowClipDefinition(
            counter_weight_decay_mode=CounterWeightDecayMode.NONE,
            counter_halflife=-1,  # every step in which a row appeared counts fully
            weight_norm_coefficient=1.0,
            lower_bound=1e-5,
        )
    return params


def set_product_precision(precision: str, device: torch.device) -> None:
    """Allows or forbids TF32 in float32 matrix products on CUDA, for the whole process; warns of slow ones on CPU."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    elif precision == "bfloat16" and torch.bfloat16 not in BY_ONE_DNN:
        _logger.warning(
            'train.precision = "bfloat16" is about ten times slower than "float32" on a processor without AVX-512'
        )


def embedding_optimizer(plan: RunPlan, model: nn.Module) -> EmbeddingAdam | LookupsHandle | None:
    """Attaches the clip rule and the optimizer to a sharded model's tables; wide weights are not clipped.

    Returns the optimizer; under FBGEMM's fused optimizer the handle of the clip, or None without a clip and L2.
    """
    config, hyperparameters, rule = plan.config, plan.scaled.hyperparameters, plan.scaled.clip
    columns = {spec.name: spec.embedding_dim for spec in plan.tables}
    if config.optimizer.embedding == "adam":
        adam, factors = adam_config(config, plan.scaled), by_table(config.optimizer.embedding_lr_factors)
        return EmbeddingAdam(model, adam, rule, clip_columns=columns, lr_factors=factors)
    if config.clip.rule == "none" and hyperparameters.l2 == 0:
        return None
    return attach_cowclip(model, rule, clip_columns=columns, single_id_bags=True, l2=hyperparameters.l2)


def adam_config(config: RunConfig, scaled: Scaled) -> AdamConfig:
    hyperparameters = scaled.hyperparameters
    return AdamConfig(
        lr=hyperparameters.embedding_lr,
        betas=hyperparameters.betas,
        eps=hyperparameters.eps,
        adam_epsilon=config.optimizer.adam_epsilon,
        l2=hyperparameters.l2,
        weight_decay=hyperparameters.weight_decay,
        absent_rows=config.optimizer.absent_rows or "replay",
        wide=scaled.wide,
    )


def dense_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters of the dense optimizer by name: all but the tables."""
    return {name: parameter for name, parameter in model.named_parameters() if ".embedding_bags." not in name}


def dense_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the dense parameters and saved buffers, such as the means of a BatchNorm, under all of their names."""
    task = model.module if isinstance(model, DistributedModelParallel) else model
    modules = dict(task.named_modules(remove_duplicate=False))
    tables = tuple(f"{path}.embeddings." for path, module in modules.items() if isinstance(module, EmbeddingFront))
    return {
        f"{path}.{key}": tensor
        for path, module in modules.items()
        if not f"{path}.".startswith(tables)
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]
        if tensor is not None and key not in module._non_persistent_buffers_set
    }


def tables_of(model: nn.Module) -> dict[str, ShardedTensor | Tensor]:
    """Returns the tables by name; the model's ``state_dict`` first brings replayed rows up to date."""
    return {key.split(".")[-2]: value for key, value in model.state_dict().items() if ".embedding_bags." in key}


def local_shards(table: ShardedTensor | Tensor) -> list[tuple[Tensor, Sequence[int]]]:
    """Returns the shards of a table on this rank, each with its first row and column; all of a data-parallel table."""
    if isinstance(table, ShardedTensor):
        return [(shard.tensor, shard.metadata.shard_offsets) for shard in table.local_shards()]
    return [(table.detach(), (0, 0))]


def gathered_table(table: ShardedTensor | Tensor, process: Process) -> Tensor:
    """Gathers a complete table on every process, or returns the only shard that it has."""
    if not isinstance(table, ShardedTensor):  # data-parallel
        return table.detach()
    if process.world_size == 1 and len(shards := table.local_shards()) == 1:
        return shards[0].tensor.detach()
    complete = torch.empty(table.size(), dtype=table.dtype, device=process.device)
    table.gather(0, complete if process.is_first else None)
    dist.broadcast(complete, 0)
    return complete


def fill_tables(model: nn.Module, specs: Sequence[TableSpec], std: float, seed: int) -> None:
    """Initializes the embedding columns with N(0, std) and the others with 0.

    Each block of rows is drawn from (seed, table, block), so that a row's values do not depend on the sharding.
    """
    widths = {spec.name: spec.embedding_dim for spec in specs}
    for name, table in tables_of(model).items():
        for shard, offsets in local_shards(table):
            _fill_shard(shard, offsets, name, widths[name], std, seed)


def _fill_shard(rows: Tensor, offsets: Sequence[int], table: str, embedding_dim: int, std: float, seed: int) -> None:
    """Initializes the shard of a table whose first row and column are ``offsets``."""
    rows.zero_()
    first, first_column = offsets
    end = first + len(rows)
    generator = torch.Generator()
    for block in range(first // _BLOCK_ROWS, -(-end // _BLOCK_ROWS)):
        digest = hashlib.sha256(f"{seed}/{table}/{block}".encode()).digest()
        generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        # Always a full block: the first numbers that torch draws depend on how many are drawn.
        values = torch.randn(_BLOCK_ROWS, embedding_dim, generator=generator).mul_(std)
        start = block * _BLOCK_ROWS
        low, high = max(start, first), min(start + _BLOCK_ROWS, end)
        own = values[low - start : high - start, first_column : first_column + rows.shape[1]]
        rows[low - first : high - first, : own.shape[1]] = own


def sharding_plan(
    model: nn.Module,
    kinds: Mapping[str, str],
    config: RunConfig,
    process: Process,
    sharder: EmbeddingBagCollectionSharder,
) -> ShardingPlan:
    """Makes the plan for the model's EmbeddingBagCollection; all ranks call together and get the same plan."""
    ((path, collection),) = [
        (path, module) for path, module in model.named_modules() if isinstance(module, EmbeddingBagCollection)
    ]
    tables = collection.embedding_bag_configs()
    if "auto" in kinds.values():
        return _planned(model, tables, kinds, config, process, sharder)
    generators = _spread_by_bytes(tables, kinds, config, process)
    plan = construct_module_sharding_plan(
        collection,
        generators,
        sharder=sharder,
        local_size=process.local_world_size,
        world_size=process.world_size,
        device_type=process.device.type,
    )
    for table in plan.values():
        if table.sharding_type in BY_ROWS:
            table.compute_kernel = _kernel(config)  # table_row_wise does not take it as an argument
    return ShardingPlan(plan={path: plan})


def _spread_by_bytes(
    tables: list[EmbeddingBagConfig], kinds: Mapping[str, str], config: RunConfig, process: Process
) -> dict[str, Callable[..., Any]]:
    """Assigns tables to ranks: the largest table first, to the ranks with the fewest bytes."""
    kernel = _kernel(config)
    load = [0.0] * process.world_size
    machine = process.local_world_size
    generators: dict[str, Callable[..., Any]] = {}
    for table in sorted(tables, key=table_bytes, reverse=True):
        kind = kinds[table.name]
        if kind == "table_wise":
            ranks = _emptiest(load, 1)
            generators[table.name] = table_wise(rank=ranks[0], compute_kernel=kernel)
        elif kind == "column_wise":
            ranks = _emptiest(load, _column_shards(table.embedding_dim, process.world_size))
            generators[table.name] = column_wise(ranks=ranks, compute_kernel=kernel)
        elif kind == "table_row_wise":
            ranks = _emptiest(load, machine)
            generators[table.name] = table_row_wise(host_index=ranks[0] // machine)
        else:
            ranks = list(range(process.world_size))
            generators[table.name] = row_wise(compute_kernel=kernel) if kind == "row_wise" else data_parallel()
        for rank in ranks:
            load[rank] += table_bytes(table) / (1 if kind == "data_parallel" else len(ranks))
    return generators


def _emptiest(load: list[float], size: int) -> list[int]:
    """Finds the group of ``size`` neighbouring ranks that holds the fewest bytes."""
    groups = [list(range(first, first + size)) for first in range(0, len(load) - size + 1, size)]
    return min(groups, key=lambda ranks: sum(load[rank] for rank in ranks))


def _column_shards(columns: int, ranks: int) -> int:
    """Computes the largest number of shards of equal width, a multiple of four, with at most one shard a rank."""
    blocks = columns // FOUR_COLUMNS
    return max(count for count in range(1, ranks + 1) if blocks % count == 0)


def _planned(
    model: nn.Module,
    tables: Sequence[EmbeddingBagConfig],
    kinds: Mapping[str, str],
    config: RunConfig,
    process: Process,
    sharder: EmbeddingBagCollectionSharder,
) -> ShardingPlan:
    """Lets TorchRec's planner choose among the kinds that CowClip supports, for tables of the kind "auto"."""
    allowed = ["table_wise", "row_wise", "table_row_wise"]
    if any(table.pooling == PoolingType.MEAN for table in tables):
        allowed = ["table_wise"]
    constraints = {
        name: ParameterConstraints(
            sharding_types=allowed if kind == "auto" else [kind],
            compute_kernels=["dense" if kind == "data_parallel" else _kernel(config)],
        )
        for name, kind in kinds.items()
    }
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=process.world_size,
            local_world_size=process.local_world_size,
            compute_device=process.device.type,
            hbm_cap=_memory_for_weights(config, process),
        ),
        batch_size=-(-config.train.batch_size // process.world_size),
        constraints=constraints,
    )
    try:
        return planner.collective_plan(model, [sharder], dist.group.WORLD)
    except PlannerError as error:
        reason = str(error).strip().partition("\n")[0].rstrip(" .")
        raise UserError(
            f"TorchRec's planner cannot fit the tables on {process.world_size} processes ({reason}); train on more, set"
            ' the kinds in [sharding], or sharding.memory = "uvm"'
        ) from error


def _kernel(config: RunConfig) -> str:
    return {"device": "fused", "uvm": "fused_uvm"}[config.sharding.memory]


def _memory_for_weights(config: RunConfig, process: Process) -> int | None:
    """Returns the device memory for weights; the planner does not count EmbeddingAdam's two moments for each weight."""
    if not torch.cuda.is_available():
        return None
    memory = torch.cuda.get_device_properties(process.device).total_memory
    shares = config.optimizer.embedding == "adam" and config.sharding.memory == "device"
    return memory // 3 if shares else memory


def describe_sharding(model: DistributedModelParallel, bags: Sequence[EmbeddingBagConfig]) -> dict[str, Any]:
    """Describes the plan of a sharded model, largest table first; bytes count the float32 weights.

    Returns ``{"ranks": P, "bytes_of_rank": [P], "tables": {name: {"kind", "rows", "columns", "bytes_of_rank": {rank:
    bytes}}}}``.
    """
    world_size = dist.get_world_size()
    tables, of_bag = dict[str, Any](), {bag.name: bag for bag in bags}
    rank_bytes = [0] * world_size
    for part in model.plan.plan.values():
        for name, sharding in part.items():
            held: Counter[int] = Counter()
            if sharding.sharding_spec is None:  # data-parallel
                held.update(dict.fromkeys(range(world_size), table_bytes(of_bag[name])))
            for shard in sharding.sharding_spec.shards if sharding.sharding_spec else ():
                held[shard.placement.rank()] += 4 * shard.shard_sizes[0] * shard.shard_sizes[1]
            for rank, size in held.items():
                rank_bytes[rank] += size
            rows, columns = of_bag[name].num_embeddings, of_bag[name].embedding_dim
            size_of = {"rows": rows, "columns": columns, "bytes_of_rank": dict(held)}
            tables[shown_name(name)] = {"kind": sharding.sharding_type, **size_of}
    largest_first = dict(sorted(tables.items(), key=lambda named: -named[1]["rows"] * named[1]["columns"]))
    return {"ranks": world_size, "bytes_of_rank": rank_bytes, "tables": largest_first}


def sharding_line(description: Mapping[str, Any]) -> str:
    """Summarizes a description: kinds of the tables, and the weights of the ranks that hold least and most of them."""
    kinds = Counter(table["kind"] for table in description["tables"].values())
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    least, most = (size(description["bytes_of_rank"]) / 2**20 for size in (min, max))
    ranks = description["ranks"]
    return f"tables: {counts}; weights: {least:,.1f} to {most:,.1f} MiB on each of {ranks} ranks, see {SHARDING}"
