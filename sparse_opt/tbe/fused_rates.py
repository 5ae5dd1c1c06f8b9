"""Learning rates of single tables under FBGEMM's fused optimizers.

Like lookup.py, this file uses private attributes of TorchRec.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection


def set_initial_rates(model: nn.Module, rates: Mapping[str, float]) -> None:
    """Sets the learning rates that tables of an unsharded model begin with, by name; others have the sharder's.

    Tables of different rates are then looked up separately.
    """
    for collection in model.modules():
        if isinstance(collection, EmbeddingBagCollection):
            for table, rate in rates.items():
                collection.embedding_bags[table].weight._optimizer_kwargs = [{"learning_rate": rate}]


def set_rates(optimizer: Any, lr: float, factors: Mapping[str, float]) -> None:
    """Sets the rates of the coming steps: ``lr`` times the factor of the table, 1 for those that are not named.

    Args:
        optimizer: ``fused_optimizer`` of a sharded model.
        lr: learning rate.
        factors: by table, as for :func:`set_initial_rates`.
    """
    table_of = {id(weight): key.split(".")[-2] for key, weight in optimizer.params.items()}
    for group in optimizer.param_groups:
        group["lr"] = lr * factors.get(table_of[id(group["params"][0])], 1.0)
    optimizer.step()  # updates nothing: hands the rates to the tables
