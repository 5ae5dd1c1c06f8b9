"""`cowrec bench --preset mlperf-dcnv2`: training steps of the shape of MLPerf Training's DLRM-DCNv2.

Network, tables and numbers of ids are those of the reference (github.com/mlcommons/training, recommendation_v2): DLRM
with low-rank DCN-v2 crosses, Adagrad, and tables under FBGEMM's fused row-wise Adagrad. The network is TorchRec's own
class. Ids are generated; AUC is not measured. F features, B samples of this process.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, product
from math import inf
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed import DistributedModelParallel
from torchrec.models.dlrm import DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.data_pipeline import Batch, Schema
from cowrec.sparse_opt import attach_cowclip
from cowrec.trainer.config.run import RunConfig
from cowrec.trainer.config.sections import ClipConfig, OptimizerConfig, TrainConfig
from cowrec.trainer.reports.text_table import aligned
from cowrec.trainer.runs.provenance import environment
from cowrec.trainer.runtime.environment import launched_rank, launched_world_size, prepare_process
from cowrec.trainer.runtime.errors import ProcessFailed
from cowrec.trainer.runtime.processes import Process, process_group
from cowrec.trainer.runtime.subprocess_call import Subprocess, run_in_subprocess
from cowrec.trainer.sharded_model.build import dense_parameters, set_product_precision, shard, train_task
from cowrec.trainer.sharded_model.run_plan import RunPlan
from cowrec.trainer.training.pipeline import pipeline_of

from .case_runner import speed
from .roofline import floor_seconds, flops_per_sample, measure_rates
from .settings import Bench
from .step_parts import profile_steps
from .timing import WARMUP_STEPS, graph_captured, memory, reset_peak_memory, step_times

TABLE_ROWS = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10),
    *(2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
)
IDS_PER_SAMPLE = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
DENSE_FEATURES, EMBEDDING_DIM = 13, 128
BOTTOM_MLP, TOP_MLP = [512, 256, EMBEDDING_DIM], [1024, 1024, 512, 256, 1]
CROSS_LAYERS, CROSS_RANK = 3, 512
LEARNING_RATE, EPS = 0.005, 1e-8
BATCH_SIZE_OF_GPU = 6912
PUBLISHED: dict[str, Any] = {
    "gpus": 8,
    "gpu": "H200",
    "batch_size": 8 * BATCH_SIZE_OF_GPU,
    "samples_per_second": 15.04e6,
    "auc": 0.80275,
    "epochs": 0.75,
}
"""MLPerf Training's published result for DLRM-DCNv2 on eight H200, as quoted to us; not checked against its tables."""
MODEL = "mlperf-dcnv2"
_BATCHES, _MOST_STEPS, _PROFILED_STEPS = 16, 100, 5
_KEYS = [f"C{number + 1}" for number in range(len(TABLE_ROWS))]


@dataclass(frozen=True)
class MLPerfCase:
    """One combination to measure.

    Attributes:
        config: batch size over all processes, device, precision, clip and optimizer.
        table_rows: rows of each table.
        seconds: time after which no further step is timed, with one process.
    """

    config: RunConfig
    table_rows: tuple[int, ...]
    seconds: float


class ClickDCN(DLRM_DCN):
    """TorchRec's DLRM_DCN with logits [B] instead of [B, 1]."""

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        return super().forward(dense_features, sparse_features).squeeze(1)


def mlperf_lines(settings: Bench) -> Iterator[dict[str, Any]]:
    """Measures each combination of batch size, precision and clip of the settings, as in :func:`bench`.

    Batch sizes are those of all processes together. Under torchrun all processes measure together, and the first one
    has the lines of the result. Tables have at most ``settings.max_rows`` rows.

    Returns:
        Lines as those of :func:`bench`, without what is about replay and Criteo's epochs; with world_size,
        samples_per_second_of_gpu (of a process), and mlperf, the published result.

    Raises:
        ValueError: a batch size is not a multiple of the number of processes.
    """
    launched = launched_world_size()
    for size in settings.batch_sizes:
        if size % launched:
            raise ValueError(f"--batch-sizes {size} is not a multiple of the {launched} processes")
    with Subprocess() as process:
        call = process.call if settings.device == "cuda" else run_in_subprocess
        for size, precision, clip in product(settings.batch_sizes, settings.precisions, settings.clips):
            case = _case(settings, size, precision, clip)
            about = {
                "mode": case.config.optimizer.embedding,
                "clip": clip,
                "precision": precision,
                "batch_size": size,
                "spacing": 1,
                "model": MODEL,
                "max_rows": settings.max_rows,
                "world_size": launched,
            }
            how = {
                "mlperf": PUBLISHED,
                "config": {key: dataclasses.asdict(getattr(case.config, key)) for key in ("optimizer", "clip")},
                **environment(torch.device(settings.device)),
            }
            try:
                values = measure_mlperf(case) if launched > 1 else call(measure_mlperf, case)
            except ProcessFailed as error:
                needs = f"its tables need {sum(case.table_rows) * 4 * EMBEDDING_DIM / 1e9:.1f} GB of memory"
                values = {"error": f"{error} ({needs})"}
            if launched_rank() == 0:
                yield {**about, **values, **how}


def measure_mlperf(case: MLPerfCase) -> dict[str, Any]:
    """Measures a case: the values of its line. With several processes, all of them call together."""
    prepare_process()
    config = case.config
    with process_group(config.train.device) as process:
        device, size = process.device, config.train.batch_size
        reset_peak_memory(device)
        batches = [
            make_batch(case.table_rows, size, process, seed=number * process.world_size + process.rank).to(device)
            for number in range(_BATCHES)
        ]
        before = memory("VmRSS", device)
        model = build_mlperf(case, process)
        if config.clip.rule != "none":
            attach_cowclip(model, config.clip.build())
        dense = dense_parameters(model)
        optimizer = torch.optim.Adagrad(dense.values(), lr=LEARNING_RATE, eps=EPS)
        pipeline, stream = pipeline_of(model, optimizer, process), cycle(batches)
        # Processes that stopped at different steps would wait for each other.
        seconds = case.seconds if process.world_size == 1 else inf
        times = step_times(lambda _: pipeline.progress(stream), WARMUP_STEPS[device.type], _MOST_STEPS, seconds, device)
        peak = memory("VmHWM", device)
        profile = profile_steps(lambda: pipeline.progress(stream), _PROFILED_STEPS, device)
        rates, flops = measure_rates(device, config.train.precision), flops_per_sample(dense)
        captured = graph_captured(pipeline, device)
    step_seconds, host_seconds = times
    speeds, traffic = speed(size, step_seconds), bytes_per_sample(batches[0])
    floor = size // process.world_size * floor_seconds(rates, flops, traffic)
    return {
        **speeds,
        "samples_per_second_of_gpu": speeds["samples_per_second"] / process.world_size,
        "host_ms": 1e3 * host_seconds,
        "captured": captured,
        "kernels": profile.kernels,
        "step_parts_ms": {part: speeds["step_ms"] * share for part, share in profile.shares.items()},
        "roofline": {
            "flops_per_sample": flops,
            "bytes_per_sample": traffic,
            **dataclasses.asdict(rates),
            "step_ms": 1e3 * floor,
        },
        "table_rows": sum(case.table_rows),
        "table_bytes": 4 * EMBEDDING_DIM * sum(case.table_rows),
        "moments_bytes": 4 * sum(case.table_rows),
        "rss_before_tables_bytes": before,
        "peak_memory_bytes": peak,
    }


def build_mlperf(case: MLPerfCase, process: Process) -> DistributedModelParallel:
    """Builds the network with its loss and shards it as a run's model is; see :func:`build_sharded`."""
    config = case.config
    set_product_precision(config.train.precision, process.device)
    torch.manual_seed(config.train.seed)
    tables = [
        EmbeddingBagConfig(name=key, embedding_dim=EMBEDDING_DIM, num_embeddings=rows, feature_names=[key])
        for key, rows in zip(_KEYS, case.table_rows, strict=True)
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    network = ClickDCN(collection, DENSE_FEATURES, BOTTOM_MLP, TOP_MLP, CROSS_LAYERS, CROSS_RANK)
    plan = RunPlan.of(config, Schema("mlperf", (), (), {}), process, bags=tables)
    return shard(train_task(network, plan), plan)


def make_batch(table_rows: tuple[int, ...], global_batch_size: int, process: Process, seed: int) -> Batch:
    """One process's samples. The first id of a feature is skewed, and determines the others.

    The reference makes samples of several ids in the same way: from one id by a fixed table of uniform draws. Here the
    rank of the first id is log-uniform, as if its frequency were one over the rank.
    """
    size, generator = global_batch_size // process.world_size, torch.Generator().manual_seed(seed)
    values, lengths = [], []
    for rows, count in zip(table_rows, IDS_PER_SAMPLE, strict=True):
        uniform = torch.rand(size, 1, generator=generator, dtype=torch.float64)
        first = (float(rows) ** uniform).long() - 1
        # Multiplying by a large prime scatters the ids; those of one sample differ by multiples of another.
        others = (first * 2_147_483_647 + torch.arange(count) * 1_000_003) % rows
        others[:, :1] = first
        values.append(others.int().flatten())
        lengths.append(torch.full((size,), count, dtype=torch.int32))
    sparse = KeyedJaggedTensor(_KEYS, torch.cat(values), lengths=torch.cat(lengths))
    sparse.offsets()
    dense = torch.rand(size, DENSE_FEATURES, generator=generator)
    label = (torch.rand(size, generator=generator) < 0.03).float()
    return Batch(dense, sparse, label, global_batch_size)


def bytes_per_sample(batch: Batch) -> float:
    """Bytes that the embeddings must move, with float32 values and int32 ids.

    Ids are read once; pooled rows and their gradients are written and read; distinct rows are read by the forward, and
    read and written by the update, with one number of Adagrad each.
    """
    width, features = 4 * EMBEDDING_DIM, batch.sparse.to_dict().values()
    distinct = sum(feature.values().unique().numel() for feature in features) / batch.label.numel()
    return 4 * sum(IDS_PER_SAMPLE) + 4 * width * len(features) + (3 * width + 8) * distinct


def mlperf_table(lines: list[dict[str, Any]]) -> str:
    """Speeds per GPU beside the published one; failed combinations are left out."""
    head = ["clip", "precision", "batch", "processes", "samples/s each", "step ms", "host ms", "peak GB", "roofline ms"]
    rows = [head, *(_cells(line) for line in lines if "error" not in line)]
    published = PUBLISHED["samples_per_second"] / PUBLISHED["gpus"]
    return f"{aligned(rows)}\nMLPerf, 8 x H200, batch {PUBLISHED['batch_size']:,}: {published:,.0f} samples/s each"


def mlperf_short(line: dict[str, Any]) -> str:
    """One line of text about a combination."""
    name = f"{MODEL}, batch {line['batch_size']}, clip {line['clip']}, {line['precision']}"
    if "error" in line:
        return f"{name}: failed: {line['error']}"
    return f"{name}: {line['samples_per_second_of_gpu']:,.0f} samples/s each, {line['step_ms']:.1f} ms a step"


def _cells(line: dict[str, Any]) -> list[str]:
    return [
        line["clip"],
        line["precision"],
        f"{line['batch_size']:,}",
        str(line["world_size"]),
        f"{line['samples_per_second_of_gpu']:,.0f}",
        f"{line['step_ms']:.2f}",
        f"{line['host_ms']:.2f}",
        f"{line['peak_memory_bytes'] / 1e9:.2f}",
        f"{line['roofline']['step_ms']:.2f}",
    ]


def _case(settings: Bench, batch_size: int, precision: str, clip: str) -> MLPerfCase:
    optimizer = OptimizerConfig(
        embedding="rowwise_adagrad",
        base_batch_size=batch_size,
        scaling="none",
        embedding_lr=LEARNING_RATE,
        dense_lr=LEARNING_RATE,
        l2=0.0,
        warmup_epochs=0.0,
        eps=EPS,
    )
    train = TrainConfig(
        batch_size=batch_size,
        device=settings.device,  # type: ignore[arg-type]
        precision=precision,  # type: ignore[arg-type]
    )
    config = RunConfig(train=train, optimizer=optimizer, clip=ClipConfig("cowclip" if clip == "on" else "none"))
    rows = tuple(min(rows, settings.max_rows or rows) for rows in TABLE_ROWS)
    return MLPerfCase(config, rows, settings.seconds)
