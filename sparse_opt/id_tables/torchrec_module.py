"""An id table with TorchRec's managed-collision interface, for use in any TorchRec model."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrec.modules.mc_modules import ManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from .config import IdTableConfig
from .layout import MAX_SEGMENTS
from .tables import IdTables

_TABLE = "table"


class IdTableModule(ManagedCollisionModule):
    """One :class:`IdTables` table for ``ManagedCollisionCollection`` and ``ManagedCollisionEmbeddingBagCollection``.

    In training every forward is a batch: ids are admitted, get rows, expire and are evicted; in evaluation nothing
    changes. Ids without a row of their own use row 0, and raw ids 0 and 1 are the rows 0 and 1 (see IdTables).

    Limits of TorchRec 1.8's interface:

    * Samples have no time: ``expire_after`` and ``Admission.window`` count batches.
    * Its collections call :meth:`evict` after the lookup and drop the result. A new id's row must be reset before it is
      looked up, so pass ``on_new_rows``, which is called then.
    * On CPU it does not shard managed collision, and on CUDA it would rebuild the module for a range of rows of each
      rank, which is impossible for a table that selects segments by hash: ``rebuild_with_output_id_range`` raises
      NotImplementedError. Sharded models translate with :class:`IdTables`, before the batch enters the model.
    """

    def __init__(
        self,
        config: IdTableConfig,
        *,
        on_new_rows: Callable[[Tensor], None] | None = None,
        seed: int = 0,
        max_segments: int = MAX_SEGMENTS,
        device: torch.device | None = None,
    ) -> None:
        """Creates an empty table.

        Args:
            config: ``features`` are the ``feature_names`` of the embedding table, in that order.
            on_new_rows: called with the rows that new ids got, int64 [n], before they are looked up.
            seed, max_segments: see :class:`IdTables`.
            device: must be the CPU, the default.

        Raises:
            ValueError: another device than the CPU.
        """
        device = device or torch.device("cpu")
        if device.type != "cpu":
            raise ValueError(
                f"IdTableModule translates ids on the CPU, got device {device}; translate ids before the copy"
            )
        self._config, self._on_new_rows = config, on_new_rows
        self._tables = IdTables({_TABLE: config}, config.features, seed=seed, max_segments=max_segments)
        self._new_rows: list[Tensor] = []
        super().__init__(device, [0, self.output_size()])

    def preprocess(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        return features

    def profile(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Assigns rows to the ids in training; returns the features unchanged."""
        if self.training:
            for feature in features.values():
                _, new_rows = self._tables.assign(*self._flat(feature))
                rows = torch.from_numpy(new_rows.row)
                if len(rows):
                    self._new_rows.append(rows)
                    if self._on_new_rows is not None:
                        self._on_new_rows(rows)
        return features

    def remap(
        self,
        features: dict[str, JaggedTensor],
        mutate_miss_lengths: bool = True,
        write_weights: Tensor | None = None,
    ) -> dict[str, JaggedTensor]:
        """Features with rows instead of ids. Ids without a row get row 0, so lengths do not change."""
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
        """ids int64 [V] and splits of the table's features; a collection passes the features' lengths as weights."""
        ids = feature.values().to(torch.int64).contiguous().numpy()
        lengths = feature.weights_or_none()
        if lengths is None or len(self._config.features) == 1:
            return ids, np.array([0, len(ids)])
        return ids, np.append(0, np.cumsum(lengths.to(torch.int64).numpy()))

    def evict(self) -> Tensor | None:
        """Rows given to new ids since the last call, int64 [n], or None; their weights belong to earlier ids."""
        new_rows, self._new_rows = self._new_rows, []
        return torch.cat(new_rows) if new_rows else None

    def output_size(self) -> int:
        """Number of rows that the embedding table must have."""
        return self._tables.num_embeddings[_TABLE]

    def input_size(self) -> int:
        return 2**63 - 1

    def buckets(self) -> int:
        return 1

    def open_slots(self) -> Tensor:
        """Number of rows without an id, int64 [1]."""
        return torch.tensor([self.output_size() - 2 - self._tables.counters()[_TABLE]["resident"]])

    def get_extra_state(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self._tables.state_dict().items()}

    def set_extra_state(self, state: Any) -> None:
        self._tables.load_state_dict(state)
        self._new_rows = []

    def validate_state(self) -> None:
        """Does nothing: loading checks the state."""

    def rebuild_with_output_id_range(
        self, output_id_range: tuple[int, int], output_segments: list[int], device: torch.device | None = None
    ) -> "IdTableModule":
        raise NotImplementedError(
            "IdTableModule cannot be sharded by TorchRec; translate with IdTables before the model"
        )
