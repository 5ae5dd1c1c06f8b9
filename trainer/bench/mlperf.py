"""The shape of MLPerf Training's DLRM-DCNv2 (up to v6.0) for `cowrec bench`: its training steps on generated ids.

The network is TorchRec's class. Tables and numbers of ids are those of the reference (github.com/mlcommons/training,
recommendation_v2): DLRM with low-rank DCN-v2 crosses, Adagrad, and tables under FBGEMM's fused row-wise Adagrad.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle
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

from ..config.run import RunConfig, config_from
from ..runtime.environment import prepare_process
from ..runtime.processes import Process, process_group
from ..sharded_model.build import dense_parameters, set_product_precision, shard, train_task
from ..sharded_model.run_plan import RunPlan
from ..sharded_model.step import pipeline_of
from .parts import graph_captured, memory, reset_peak_memory, step_times, step_values

NAME, EMBEDDING_DIM = "mlperf-dcnv2", 128
ROW_BYTES = 4 * EMBEDDING_DIM + 4
"""Bytes of a row with the one moment of row-wise Adagrad."""
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


class ClickDCN(DLRM_DCN):
    """TorchRec's DLRM_DCN with logits [B] instead of [B, 1]."""

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        output: Tensor = super().forward(dense_features, sparse_features).squeeze(1)
        return output


def mlperf_config(batch_size: int, precision: str, clip: str, device: str) -> RunConfig:
    """Makes the settings of the reference for a batch over all processes; nothing scales them."""
    unscaled = {"scaling": "none", "base_batch_size": batch_size, "l2": 0.0, "warmup_epochs": 0.0}
    rates = {"embedding_lr": LEARNING_RATE, "dense_lr": LEARNING_RATE, "eps": EPS}
    return config_from(
        {
            "train": {"batch_size": batch_size, "device": device, "precision": precision},
            "optimizer": {"embedding": "rowwise_adagrad", **unscaled, **rates},
            "clip": {"rule": "cowclip" if clip == "on" else "none"},
        }
    )


def measure_mlperf(config: RunConfig, rows: Sequence[int], seconds: float) -> Iterator[dict[str, Any]]:
    """Yields the values of a configuration's line as they become known; all processes call together.

    With one process no step is timed after ``seconds``; several processes would wait for each other.
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
    """Builds the network with its loss and shards it as :func:`build_sharded` shards the model of a run."""
    set_product_precision(config.train.precision, process.device)
    torch.manual_seed(config.train.seed)
    tables = [
        EmbeddingBagConfig(name=key, embedding_dim=EMBEDDING_DIM, num_embeddings=count, feature_names=[key])
        for key, count in zip(_keys(rows), rows, strict=True)
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    network = ClickDCN(collection, DENSE_FEATURES, BOTTOM_MLP, TOP_MLP, CROSS_LAYERS, CROSS_RANK)
    plan = RunPlan.of(config, Schema("mlperf", (), (), {}), process, bags=tables)
    return shard(train_task(network, plan), plan)


def make_batch(table_rows: Sequence[int], global_batch_size: int, process: Process, seed: int) -> Batch:
    """Makes the samples of one process. The first id of a feature is skewed, and determines the others.

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
    sparse = KeyedJaggedTensor(_keys(values), torch.cat(values), lengths=torch.cat(lengths))
    sparse.offsets()
    dense = torch.rand(size, DENSE_FEATURES, generator=generator)
    label = (torch.rand(size, generator=generator) < 0.03).float()
    return Batch(dense, sparse, label, global_batch_size)


def mlperf_bytes_per_sample(batch: Batch) -> float:
    """Counts the bytes that the embeddings must move, with float32 values and int32 ids.

    Ids are read once; pooled rows and their gradients are written and read; distinct rows are read by the forward, and
    read and written by the update, with one number of Adagrad each.
    """
    width, features = 4 * EMBEDDING_DIM, batch.sparse.to_dict().values()
    distinct = sum(feature.values().unique().numel() for feature in features) / batch.label.numel()
    return float(4 * sum(IDS_PER_SAMPLE) + 4 * width * len(features) + (3 * width + 8) * distinct)


def _keys(tables: Sequence[object]) -> list[str]:
    return [f"C{number + 1}" for number in range(len(tables))]
