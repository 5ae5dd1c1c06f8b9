"""Ids that readers of publications know, and those of them that were deleted since the last publication.

n rows, m deleted ids.
"""

import numpy as np
from numpy.typing import NDArray

from cowrec.trainer.publishing.blob import row_keys
from cowrec.trainer.sharded_model.tables import TableSpec


class KnownIds:
    """Ids by which readers know the rows of a collisionless table, and those of these ids that were deleted.

    Each of several processes keeps those of the rows whose ids it holds.

    Args:
        spec: the table.
    """

    def __init__(self, spec: TableSpec):
        self._ids = np.zeros(spec.num_embeddings, np.int64)  # 0: none
        self._features = np.zeros(spec.num_embeddings, np.uint16)
        self._deleted: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []

    def set(self, rows: NDArray[np.int64], ids: NDArray[np.int64], features: NDArray[np.int64]) -> None:
        """Notes the ids of rows that readers get with a complete model, [n]."""
        self._ids[rows], self._features[rows] = ids, features

    def free(self, rows: NDArray[np.int64]) -> None:
        """Notes rows whose ids were deleted."""
        known = rows[self._ids[rows] != 0]
        if len(known):
            self._deleted.append((self._ids[known], self._features[known].astype(np.int64)))
            self._ids[known] = 0

    def update(
        self, rows: NDArray[np.int64], ids: NDArray[np.int64], features: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sets the ids by which readers will know these rows; returns the deleted ids and their features, [m]."""
        self.free(rows[(self._ids[rows] != ids) | (self._features[rows] != features)])
        self.set(rows, ids, features)
        deleted = [np.empty(0, int)] * 2
        if self._deleted:
            deleted = [np.concatenate(each) for each in zip(*self._deleted, strict=True)]
        self._deleted = []
        # An id may have come back since, in another row.
        back = np.isin(row_keys(*deleted), row_keys(ids, features))
        return deleted[0][~back], deleted[1][~back]
