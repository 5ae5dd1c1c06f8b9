"""Learning rates of tables, as factors of the optimizer's learning rate."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import torch
from torch import nn

from cowrec.sparse_opt.algorithm.adam import AdamConfig
from cowrec.sparse_opt.clipping.table_rules import require_known
from cowrec.sparse_opt.tbe.discovery import all_table_names, meant_tables
from cowrec.sparse_opt.tbe.lookup import TbeLookup


@dataclass(frozen=True)
class TableRates:
    """Factors by which tables' learning rates differ from the optimizer's.

    Attributes:
        factors: by the tables' names in the model; 1 for those that are not named.
    """

    factors: Mapping[str, float]

    def require_valid(self, config: AdamConfig) -> None:
        """Raises ValueError for a factor out of range, or a rate under which weight decay would change signs."""
        for table, factor in self.factors.items():
            if not 0 <= factor < inf:
                raise ValueError(f"lr_factors of table {table!r} must be at least 0 and finite, got {factor}")
            if config.lr * factor * config.weight_decay > 1:
                raise ValueError(
                    f"lr_factors gives table {table!r} the learning rate {config.lr * factor:g}, whose product with"
                    f" weight_decay = {config.weight_decay:g} must be at most 1; lower one of them"
                )

    def of(self, lookup: TbeLookup) -> torch.Tensor:
        """Factors of a lookup's tables, float32 [tables], on the CPU."""
        return torch.tensor([self.factors.get(shard.name, 1.0) for shard in lookup.shards], dtype=torch.float32)


def table_rates(model: nn.Module, lr_factors: Mapping[str, float] | None) -> TableRates:
    """Finds the tables that ``lr_factors`` names. Raises ValueError, with the nearest name, for an unknown one."""
    named = meant_tables(model, given := dict(lr_factors or {}))
    require_known("lr_factors", list(named), all_table_names(model))
    return TableRates({table: float(given[name]) for table, name in named.items()})
