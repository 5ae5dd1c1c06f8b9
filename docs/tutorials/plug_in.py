"""The plug-in: CowClip in a TorchRec job that you have already, without cowrec's trainer.

Run this script with `python docs/tutorials/plug_in.py`. It takes some seconds. docs/plug_in.md has all options.
"""

import io
import logging
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.sparse_opt import PRESETS, AdamConfig, CowClip, EmbeddingAdam, attach_cowclip

FIELDS, ROWS, DIM = ["user", "item"], 1000, 8

# %% Your model may look like this one: tables in an EmbeddingBagCollection, and a network on top.


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
    """Draws ids from a power law; users click on items of their own parity."""
    ids = (ROWS * torch.rand(len(FIELDS), size, generator=draw) ** 3).long()
    ones = torch.ones(len(FIELDS) * size, dtype=torch.int32)
    clicks = (ids[0] + ids[1]) % 2 == 0
    return KeyedJaggedTensor(FIELDS, ids.flatten(), lengths=ones), clicks.float()


def sharded_model(optimizer: type[torch.optim.Optimizer], lr: float) -> DistributedModelParallel:
    """Shards the model by the plan of TorchRec's planner, its tables under a fused optimizer."""
    torch.manual_seed(0)
    model = Model()
    apply_optimizer_in_backward(optimizer, model.tables.parameters(), {"lr": lr})
    return DistributedModelParallel(model, device=torch.device("cpu"))


def job_optimizer(model: DistributedModelParallel) -> CombinedOptimizer:
    """TorchRec's recipe: the fused optimizer of the tables, and Adam for all other parameters."""
    network = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = KeyedOptimizerWrapper(network, lambda parameters: torch.optim.Adam(parameters, lr=1e-3))
    return CombinedOptimizer([model.fused_optimizer, dense])


def train(model: DistributedModelParallel, optimizer: CombinedOptimizer, steps: range) -> None:
    """Trains without any code of cowrec. The loss must be the mean over the global batch."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - (steps.start + step) / 60)
    draw = torch.Generator().manual_seed(1 + steps.start)
    for step in steps:
        ids, clicks = batch(512, draw)
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids), clicks)
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")


def main() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    # %% CowClip under the optimizer that you have takes one line: from here on, the gradient of each row is clipped in
    # the backward pass.
    model = sharded_model(RowWiseAdagrad, lr=0.1)
    handle = attach_cowclip(model, CowClip(r=1e-3, zeta=1e-5))
    train(model, job_optimizer(model), range(60))

    # %% The share of clipped updates shows whether the clip has an effect. With r = 1, as in the paper, it would have
    # none on data as easy as these.
    for table, statistics in handle.stats().items():
        print(f"{table}: {statistics.clipped_share:.1%} of {statistics.rows:,} row updates were clipped")
    handle.remove()

    # %% The optimizer of the paper replaces fused SGD. Make it right after DistributedModelParallel. Schedulers,
    # wrappers and checkpoints continue to use model.fused_optimizer.
    model = sharded_model(torch.optim.SGD, lr=0.1)
    EmbeddingAdam(model, AdamConfig(lr=0.05, l2=1e-5), CowClip(r=1.0, zeta=1e-5))
    optimizer = job_optimizer(model)
    train(model, optimizer, range(40))
    checkpoint = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)

    # %% A new process continues from the checkpoint.
    model = sharded_model(torch.optim.SGD, lr=0.1)
    EmbeddingAdam(model, AdamConfig(lr=0.05, l2=1e-5), CowClip(r=1.0, zeta=1e-5))
    optimizer = job_optimizer(model)
    optimizer.optimizers[1][1].init_state()  # as TorchRec asks for before a state of a dense optimizer is loaded
    checkpoint.seek(0)
    state = torch.load(checkpoint, weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    train(model, optimizer, range(40, 60))

    # %% PRESETS has the hyperparameters of the paper for a data set, as functions of the batch size.
    print(PRESETS["criteo"](131072).hyperparameters)
    dist.destroy_process_group()


if __name__ == "__main__":
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)  # inside TorchRec
    main()
