"""`cowrec bench --preset embedding-adam`: lookup and update of tables alone, without a network.

The shape is that of a published measurement: ten tables of 128 columns, one id of each a sample, 1.05 million ids in
all. Other optimizers of that measurement update the rows of the batch, so absent rows are not replayed here either.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.data_pipeline import Schema
from cowrec.sparse_opt import EmbeddingAdam
from cowrec.sparse_opt.kernels.profiling import profiled
from cowrec.trainer.config.run import RunConfig
from cowrec.trainer.runtime.environment import prepare_process
from cowrec.trainer.runtime.processes import process_group
from cowrec.trainer.sharded_model.build import adam_config, shard
from cowrec.trainer.sharded_model.run_plan import RunPlan

from .parts import bytes_per_sample, memory, reset_peak_memory, step_times, step_values
from .settings import Preset, preset_config

MODEL, BATCH_SIZE, EMBEDDING_DIM = "embedding-adam", 104_858, 128
TABLE_ROWS = (2_400_000,) * 10
PUBLISHED = {"FBGEMM's Adam": 1.35, "NVIDIA's dynamicemb": 2.19}
"""Milliseconds of forward and update on one H100, as quoted to us; not checked against their tables."""
_BATCHES, _MOST_STEPS, _EXPONENT, _RATE = 16, 100, 1.05, 1e-3
# The rate of the network has no meaning, since there is none.
_config = partial(preset_config, absent_rows="lazy", embedding_lr=_RATE, dense_lr=_RATE)
_KEYS = [f"C{number + 1}" for number in range(len(TABLE_ROWS))]


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
        tables = [EmbeddingBagConfig(num_embeddings=each, embedding_dim=EMBEDDING_DIM, name=key, feature_names=[key])
                  for key, each in zip(_KEYS, rows, strict=True)]  # fmt: skip
        plan = RunPlan.of(config, Schema(MODEL, (), (), {}), process, bags=tables)
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
    lengths = torch.ones(len(table_rows) * size, dtype=torch.int32)
    ids = KeyedJaggedTensor(_KEYS, torch.cat(drawn), lengths=lengths)
    ids.offsets()
    return ids


PRESET = Preset(MODEL, TABLE_ROWS, 3 * 4 * EMBEDDING_DIM, BATCH_SIZE, _config, measure_tables)
