"""Example of CowClip in a TorchRec job: unchanged DLRM, optimizer, planner and pipeline, and two lines of cowrec.

python scripts/torchrec_dlrm_example.py
torchrun --nproc-per-node 2 scripts/torchrec_dlrm_example.py

With --replay, the tables are trained by the CowClip paper's optimizer instead: Adam whose L2 moves every row at every
step, at the cost of the batch's rows only. It needs a third line: the tables are sharded under plain SGD, which the
optimizer replaces.
"""

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.sparse_opt import AdamConfig, CowClip, EmbeddingAdam, LookupsHandle, TableStats, attach_cowclip  # line 1

FIELDS = [f"field{i}" for i in range(8)]
ROWS, DIM, DENSE, MAX_IDS = 10_000, 16, 4, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replay", action="store_true", help="train the tables with EmbeddingAdam")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=512, help="samples per step and process")
    arguments = parser.parse_args()
    device = join_processes()

    torch.manual_seed(0)
    tables = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=field, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[field])
            for field in FIELDS
        ],
        device=torch.device("meta"),
    )
    if arguments.replay:
        apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 0.0})  # line 3, for --replay
    else:
        apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.05})
    model = sharded(DLRMTrain(DLRM(tables, DENSE, [32, DIM], [32, 1], dense_device=device)), device)

    handle: LookupsHandle | EmbeddingAdam
    if arguments.replay:
        handle = EmbeddingAdam(model, AdamConfig(lr=0.01, l2=1e-6), CowClip(r=1.0, zeta=1e-5))
    else:
        handle = attach_cowclip(model, CowClip(r=1.0, zeta=1e-5))  # line 2

    dense = torch.optim.Adam([weight for _, weight in in_backward_optimizer_filter(model.named_parameters())], lr=1e-3)
    pipeline = TrainPipelineSparseDist(model, dense, device)
    batches = random_batches(arguments.steps, arguments.batch_size)
    for step in range(1, arguments.steps + 1):
        loss, _, _ = pipeline.progress(batches)
        if step % 50 == 0 or step == 1:
            say(f"step {step:4}  loss {mean_over_ranks(loss):.4f}")
    stats_by_rank: list[dict[str, TableStats]] = [{}] * dist.get_world_size()
    dist.all_gather_object(stats_by_rank, handle.stats())
    for table, stats in sorted(item for tables in stats_by_rank for item in tables.items()):
        ratio = f"median ||g|| / limit {stats.median_ratio:.2g}"
        say(f"{table}  {stats.rows} rows updated, {stats.clipped_share:.2%} of them clipped, {ratio} in the last step")
    dist.destroy_process_group()


def join_processes() -> torch.device:
    """Joins the process group of torchrun, or one of a single process; returns the device of this process."""
    on_gpu, rank = torch.cuda.is_available(), int(os.environ.get("LOCAL_RANK", "0"))
    if "RANK" not in os.environ:
        dist.init_process_group("nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    if on_gpu:
        torch.cuda.set_device(rank)
    return torch.device("cuda", rank) if on_gpu else torch.device("cpu")


def sharded(model: nn.Module, device: torch.device) -> DistributedModelParallel:
    """Shards the model with TorchRec's planner (on CPU, table-wise only)."""
    topology = Topology(dist.get_world_size(), device.type, local_world_size=dist.get_world_size())
    sharders = [EmbeddingBagCollectionSharder()]
    plan = EmbeddingShardingPlanner(topology=topology).collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)


def random_batches(steps: int, batch_size: int) -> Iterator[Batch]:
    """Yields clicks that depend on dense values and power-law ids; 1 to 3 ids per field."""
    effects = torch.randn(len(FIELDS), ROWS, generator=torch.Generator().manual_seed(1))
    draw = torch.Generator().manual_seed(2 + dist.get_rank())
    for _ in range(steps):
        dense = torch.rand(batch_size, DENSE, generator=draw)
        lengths = torch.randint(1, MAX_IDS + 1, (len(FIELDS), batch_size), generator=draw)
        fields = torch.arange(len(FIELDS)).repeat_interleave(lengths.sum(1))
        ids = (ROWS * torch.rand(len(fields), generator=draw) ** 4).long()
        samples = torch.arange(batch_size).repeat(len(FIELDS)).repeat_interleave(lengths.flatten())
        score = dense.sum(1) - DENSE / 2 + torch.zeros(batch_size).index_add(0, samples, effects[fields, ids])
        clicks = torch.rand(batch_size, generator=draw) < score.sigmoid()
        yield Batch(dense, KeyedJaggedTensor(FIELDS, ids, lengths=lengths.flatten()), clicks.int())


def mean_over_ranks(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning)
    for library in ("torchrec", "torch.fx._symbolic_trace"):
        logging.getLogger(library).setLevel(logging.ERROR)
    main()
    # Threads of torch that outlive the process group may abort a process at exit.
    sys.stdout.flush()
    os._exit(0)
