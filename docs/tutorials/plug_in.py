"""The plug-in: CowClip in a TorchRec job that you have already, without cowrec's trainer.

Run it with `python docs/tutorials/plug_in.py`; it takes some seconds. docs/plug_in.md has all that can be combined.
"""

import logging
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.sparse_opt import PRESETS, CowClip, attach_cowclip

FIELDS, ROWS, DIM = ["user", "item"], 1000, 8

# %% A model as yours may be: tables in an EmbeddingBagCollection, a network on top.


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[name])
                for name in FIELDS
            ],
            device=torch.device("meta"),
        )
        self.network = nn.Sequential(nn.Linear(DIM * len(FIELDS), 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        logits: torch.Tensor = self.network(self.tables(ids).values()).squeeze(1)
        return logits


def batch(size: int, draw: torch.Generator) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    """Ids of a power law; users click on items of their own parity."""
    ids = (ROWS * torch.rand(len(FIELDS), size, generator=draw) ** 3).long()
    ones = torch.ones(len(FIELDS) * size, dtype=torch.int32)
    clicks = (ids[0] + ids[1]) % 2 == 0
    return KeyedJaggedTensor(FIELDS, ids.flatten(), lengths=ones), clicks.float()


def main() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model = Model()
    apply_optimizer_in_backward(RowWiseAdagrad, model.tables.parameters(), {"lr": 0.1})
    sharders = [EmbeddingBagCollectionSharder()]
    plan = EmbeddingShardingPlanner(topology=Topology(1, "cpu")).collective_plan(model, sharders, dist.group.WORLD)
    sharded = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)

    # %% The plug-in is one line: from here on, the gradient of each row is clipped in the backward pass.
    handle = attach_cowclip(sharded, CowClip(r=1e-3, zeta=1e-5))

    # %% Your training loop stays as it is. The loss must be the mean over the global batch.
    dense = torch.optim.Adam(model.network.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(1)
    for step in range(1, 61):
        ids, clicks = batch(512, draw)
        loss = nn.functional.binary_cross_entropy_with_logits(sharded(ids), clicks)
        dense.zero_grad()
        loss.backward()
        dense.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}")

    # %% How often did it bind? A clip that never does has no effect; the published r = 1 does not bind on
    # data as easy as these.
    for table, statistics in handle.stats().items():
        print(f"{table}: {statistics.clipped_share:.1%} of {statistics.rows:,} row updates were clipped")

    # %% The published hyperparameters of a data set, scaled to a batch size, are functions of plain numbers.
    print(PRESETS["criteo"](131072).hyperparameters)
    handle.remove()
    dist.destroy_process_group()


if __name__ == "__main__":
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)  # inside TorchRec
    main()
