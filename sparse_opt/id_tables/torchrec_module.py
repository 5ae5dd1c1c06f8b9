"""An id table behind TorchRec's managed-collision interface, for other people's TorchRec models."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrec.modules.mc_modules import ManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from .tables import IdTableConfig, IdTables

_TABLE = "table"


class IdTableModule(ManagedCollisionModule):
    """One :class:`IdTables` table for ``ManagedCollisionCollection`` and ``ManagedCollisionEmbeddingBagCollection``.

    In training every forward is a batch: ids are admitted, get rows, expire and are evicted; in evaluation nothing
    changes. Row 0 is that of ids without a row of their own, and raw ids 0 and 1 are the rows 0 and 1 (see IdTables).

    What TorchRec 1.8's interface does not allow:

    * Samples have no time: ``expire_after`` and ``Admission.window`` count batches.
    * Its collections call :meth:`evict` after the lookup and drop what it returns. A new id's row is to be reset before
      it is looked up, so give ``on_birth``, which is called then.
    * On CPU it does not shard managed collision, and on CUDA it would rebuild the module for a range of rows of each
      rank, which a table that places ids by their hash cannot follow: ``rebuild_with_output_id_range`` refuses.
      Models that are sharded translate with :class:`IdTables` itself, before the batch enters the model.
    """

    def __init__(
        self,
        config: IdTableConfig,
        *,
        on_birth: Callable[[Tensor], None] | None = None,
        seed: int = 0,
        shards: int = 64,
        device: torch.device | None = None,
    ) -> None:
        """An empty table.

        Args:
            config: ``features`` are the ``feature_names`` of the embedding table, in that order.
            on_birth: is given the rows that new ids got, int64 [n], before they are looked up.
            seed: as for IdTables.
            shards: as for IdTables.
            device: of the features; CPU, the default.
        """
        device = device or torch.device("cpu")
        if device.type != "cpu":
            raise ValueError(f"IdTableModule translates ids on the CPU, got device {device}; translate before the copy")
        self._config, self._on_birth = config, on_birth
        self._tables = IdTables({_TABLE: config}, config.features, seed=seed, shards=shards)
        self._born: list[Tensor] = []
        super().__init__(device, [0, self.output_size()])

    def preprocess(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        return features

    def profile(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """In training takes the ids as a batch; returns the features as they are."""
        if self.training:
            for feature in features.values():
                _, births = self._tables.assign(*self._flat(feature))
                rows = torch.from_numpy(births.row)
                if len(rows):
                    self._born.append(rows)
                    if self._on_birth is not None:
                        self._on_birth(rows)
        return features

    def remap(
        self,
        features: dict[str, JaggedTensor],
        mutate_miss_lengths: bool = True,
        write_weights: Tensor | None = None,
    ) -> dict[str, JaggedTensor]:
        """Features with rows in place of ids. Ids without a row get row 0, so no length changes."""
        return {
            name: JaggedTensor(
                values=torch.from_numpy(self._tables.rows_of(*self._flat(feature))).view_as(feature.values()),
                lengths=feature.lengths(),
                offsets=feature.offsets(),
                weights=feature.weights_or_none(),
            )
            for name, feature in features.items()
        }

    def forward(self, features: dict[str, JaggedTensor], mutate_miss_lengths: bool = True) -> dict[str, JaggedTensor]:
        return self.remap(self.profile(self.preprocess(features)), mutate_miss_lengths)

    def _flat(self, feature: JaggedTensor) -> tuple[np.ndarray, np.ndarray]:
        """ids int64 [V] and where each of the table's features begins, whose lengths a collection gives as weights."""
        ids = feature.values().to(torch.int64).contiguous().numpy()
        lengths = feature.weights_or_none()
        if lengths is None or len(self._config.features) == 1:
            return ids, np.array([0, len(ids)])
        return ids, np.append(0, np.cumsum(lengths.to(torch.int64).numpy()))

    def evict(self) -> Tensor | None:
        """Rows that went to new ids since the last call, int64 [n], or None: what was learnt in them is of others."""
        born, self._born = self._born, []
        return torch.cat(born) if born else None

    def output_size(self) -> int:
        """Rows that the embedding table must have."""
        return self._tables.num_embeddings[_TABLE]

    def input_size(self) -> int:
        return 2**63 - 1

    def buckets(self) -> int:
        return 1

    def open_slots(self) -> Tensor:
        """Rows that no id has, int64 [1]."""
        return torch.tensor([self.output_size() - 2 - self._tables.counters()[_TABLE]["resident"]])

    def get_extra_state(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self._tables.state_dict().items()}

    def set_extra_state(self, state: Any) -> None:
        self._tables.load_state_dict(state)
        self._born = []

    def validate_state(self) -> None:
        """Nothing is left to check: loading checks."""

    def rebuild_with_output_id_range(
        self, output_id_range: tuple[int, int], output_segments: list[int], device: torch.device | None = None
    ) -> "IdTableModule":
        raise NotImplementedError(
            "IdTableModule cannot be sharded by TorchRec; translate with IdTables before the model"
        )
