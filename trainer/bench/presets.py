"""The presets of `cowrec bench`: training steps of published shapes other than Criteo's, on generated ids.

``mlperf-dcnv2``: network, tables and numbers of ids of MLPerf Training's DLRM-DCNv2 (up to v6.0), as in the reference
(github.com/mlcommons/training, recommendation_v2): DLRM with low-rank DCN-v2 crosses, Adagrad, and tables under
FBGEMM's fused row-wise Adagrad. The network is TorchRec's own class. AUC is not measured.

``embedding-adam``: lookup and update of tables alone, without a network. The shape is that of a published measurement:
ten tables of 128 columns, one id of each a sample, 1.05 million ids in all. Other optimizers of that measurement update
the rows of the batch, so absent rows are not replayed here either.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.models.dlrm import DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.data_pipeline import Batch, Schema
from cowrec.sparse_opt import EmbeddingAdam, attach_cowclip
from cowrec.sparse_opt.kernels.profiling import profiled

from ..config.run import RunConfig
from ..runtime.environment import prepare_process
from ..runtime.processes import Process, process_group
from ..sharded_model.build import adam_config, dense_parameters, set_product_precision, shard, train_task
from ..sharded_model.run_plan import RunPlan
from ..training.pipeline import pipeline_of
from .parts import bytes_per_sample, graph_captured, memory, reset_peak_memory, step_times, step_values
from .settings import Preset, preset_config

MLPERF, TABLES_ALONE, EMBEDDING_DIM = "mlperf-dcnv2", "embedding-adam", 128
_BATCHES, _MOST_STEPS = 16, 100

TABLE_ROWS = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10),
    *(2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
)
IDS_PER_SAMPLE = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
DENSE_FEATURES, CROSS_LAYERS, CROSS_RANK = 13, 3, 512
BOTTOM_MLP, TOP_MLP = [512, 256, EMBEDDING_DIM], [1024, 1024, 512, 256, 1]
LEARNING_RATE, EPS = 0.005, 1e-8
BATCH_SIZE_OF_GPU = 6912
PUBLISHED = 15.04e6
"""Samples per second that MLPerf Training published for eight H200, as quoted to us; not checked against its tables."""
mlperf_config = partial(
    preset_config, embedding="rowwise_adagrad", embedding_lr=LEARNING_RATE, dense_lr=LEARNING_RATE, eps=EPS
)
"""Makes the settings of the reference; see :func:`preset_config`."""

ADAM_BATCH_SIZE, ADAM_TABLE_ROWS = 104_858, (2_400_000,) * 10
ADAM_PUBLISHED = {"FBGEMM's Adam": 1.35, "NVIDIA's dynamicemb": 2.19}
"""Milliseconds of forward and update on one H100, as quoted to us; not checked against their tables."""
_EXPONENT, _RATE = 1.05, 1e-3
# The rate of the network has no meaning, since there is none.
_adam_config = partial(preset_config, absent_rows="lazy", embedding_lr=_RATE, dense_lr=_RATE)


class ClickDCN(DLRM_DCN):
    """TorchRec's DLRM_DCN with logits [B] instead of [B, 1]."""

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        output: Tensor = super().forward(dense_features, sparse_features).squeeze(1)
        return output


def measure_mlperf(config: RunConfig, rows: Sequence[int], seconds: float) -> Iterator[dict[str, Any]]:
    """Yields the values of a configuration's line as they become known. With several processes, all call together.

    With one process no step is timed after so many seconds; several would wait for each other.
    """
    prepare_process()
    with process_group(config.train.device) as process:
        device, size = process.device, config.train.batch_size
        reset_peak_memory(device)
        ranks, first = process.world_size, process.rank
        batches = [make_batch(rows, size, process, seed).to(device) for seed in range(first, _BATCHES * ranks, ranks)]
        before = memory("VmRSS", device)
        model = build_mlperf(config, rows, process)
        if config.clip.rule != "none":
            attach_cowclip(model, config.clip.build())
        dense = dense_parameters(model)
        optimizer = torch.optim.Adagrad(dense.values(), lr=LEARNING_RATE, eps=EPS)
        pipeline = pipeline_of(model, optimizer, process)
        step = partial(pipeline.progress, cycle(batches))
        timed = step_times(lambda _: step(), size, _MOST_STEPS, seconds if ranks == 1 else inf, device)
        yield {
            **timed,
            "samples_per_second_of_gpu": timed["samples_per_second"] / ranks,
            "captured": graph_captured(pipeline, device),
            "world_size": ranks,
            "table_rows": sum(rows),
            "table_bytes": 4 * EMBEDDING_DIM * sum(rows),
            "moments_bytes": 4 * sum(rows),
            "rss_before_tables_bytes": before,
        }
        traffic = mlperf_bytes_per_sample(batches[0])
        yield from step_values(timed["step_ms"], size // ranks, step, dense, traffic, config.train.precision, device)


def build_mlperf(config: RunConfig, rows: Sequence[int], process: Process) -> DistributedModelParallel:
    """Builds the network with its loss and shards it as a run's model is; see :func:`build_sharded`."""
    set_product_precision(config.train.precision, process.device)
    torch.manual_seed(config.train.seed)
    tables = _tables(rows)
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    network = ClickDCN(collection, DENSE_FEATURES, BOTTOM_MLP, TOP_MLP, CROSS_LAYERS, CROSS_RANK)
    plan = RunPlan.of(config, Schema("mlperf", (), (), {}), process, bags=tables)
    return shard(train_task(network, plan), plan)


def make_batch(table_rows: Sequence[int], global_batch_size: int, process: Process, seed: int) -> Batch:
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
    sparse = _keyed(values, torch.cat(lengths))
    dense = torch.rand(size, DENSE_FEATURES, generator=generator)
    label = (torch.rand(size, generator=generator) < 0.03).float()
    return Batch(dense, sparse, label, global_batch_size)


def mlperf_bytes_per_sample(batch: Batch) -> float:
    """Bytes that the embeddings must move, with float32 values and int32 ids.

    Ids are read once; pooled rows and their gradients are written and read; distinct rows are read by the forward, and
    read and written by the update, with one number of Adagrad each.
    """
    width, features = 4 * EMBEDDING_DIM, batch.sparse.to_dict().values()
    distinct = sum(feature.values().unique().numel() for feature in features) / batch.label.numel()
    return float(4 * sum(IDS_PER_SAMPLE) + 4 * width * len(features) + (3 * width + 8) * distinct)


class _PooledRows(nn.Module):
    """The rows of all tables, float [B, sum D]."""

    def __init__(self, tables: list[EmbeddingBagConfig]) -> None:
        super().__init__()
        self.embeddings = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        rows: Tensor = self.embeddings(ids).values()
        return rows


def measure_tables(config: RunConfig, rows: Sequence[int], seconds: float) -> Iterator[dict[str, Any]]:
    """Yields the values of a configuration's line as they become known. No step is timed after so many seconds."""
    prepare_process()
    with process_group(config.train.device) as process:
        device, size = process.device, config.train.batch_size
        reset_peak_memory(device)
        batches = [make_ids(rows, size, seed).to(device) for seed in range(_BATCHES)]
        gradient, before = 1e-4 * torch.randn(size, len(rows) * EMBEDDING_DIM, device=device), memory("VmRSS", device)
        torch.manual_seed(config.train.seed)
        tables = _tables(rows)
        plan = RunPlan.of(config, Schema(TABLES_ALONE, (), (), {}), process, bags=tables)
        model = shard(_PooledRows(tables), plan)
        EmbeddingAdam(model, adam_config(config, plan.scaled), plan.scaled.clip)
        coming = cycle(batches)

        def step() -> None:
            with profiled("## forward ##"):
                pooled = model(next(coming))
            with profiled("## backward ##"):
                pooled.backward(gradient)

        timed = step_times(lambda _: step(), size, _MOST_STEPS, seconds, device)
        bytes_of_tables = 4 * EMBEDDING_DIM * sum(rows)
        yield {
            **timed,
            "table_rows": sum(rows),
            "table_bytes": bytes_of_tables,
            "moments_bytes": 2 * bytes_of_tables,
            "rss_before_tables_bytes": before,
        }
        distinct = sum(len(each.values().unique()) for each in batches[0].to_dict().values()) / size
        traffic = bytes_per_sample(len(rows), EMBEDDING_DIM, distinct)
        yield from step_values(timed["step_ms"], size, step, {}, traffic, config.train.precision, device)


def make_ids(table_rows: Sequence[int], size: int, seed: int) -> KeyedJaggedTensor:
    """One id of each table for each sample; frequencies fall with the rank to the power of 1.05."""
    generator, drawn = torch.Generator().manual_seed(seed), []
    for rows in table_rows:
        # Inverse of the distribution function of a continuous power law on [1, rows + 1).
        share = torch.rand(size, generator=generator, dtype=torch.float64)
        power = 1.0 - _EXPONENT
        rank = (1.0 - share * (1.0 - (rows + 1.0) ** power)) ** (1.0 / power)
        drawn.append((rank.long() - 1).clamp_(0, rows - 1).int())
    return _keyed(drawn, torch.ones(len(table_rows) * size, dtype=torch.int32))


def _tables(rows: Sequence[int]) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name=key, embedding_dim=EMBEDDING_DIM, num_embeddings=each, feature_names=[key])
        for key, each in zip(_keys(rows), rows, strict=True)
    ]


def _keyed(ids: Sequence[Tensor], lengths: Tensor) -> KeyedJaggedTensor:
    """The ids of each table, one table's after the other's."""
    keyed = KeyedJaggedTensor(_keys(ids), torch.cat(list(ids)), lengths=lengths)
    keyed.offsets()
    return keyed


def _keys(tables: Sequence[object]) -> list[str]:
    return [f"C{number + 1}" for number in range(len(tables))]


PRESETS = {
    each.name: each
    for each in (
        Preset(MLPERF, TABLE_ROWS, 516, BATCH_SIZE_OF_GPU, mlperf_config, measure_mlperf, takes_processes=True),
        Preset(TABLES_ALONE, ADAM_TABLE_ROWS, 3 * 4 * EMBEDDING_DIM, ADAM_BATCH_SIZE, _adam_config, measure_tables),
    )
}
"""By their names."""
