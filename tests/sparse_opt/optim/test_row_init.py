"""Initial weights of the rows of new ids, which depend on the id alone."""

import numpy as np
import pytest
import torch
from scipy import stats

from cowrec.sparse_opt.optim.row_init import initial_rows

KEYS = np.full(20_000, 12345, np.uint64)


def test_initial_weights_are_normal() -> None:
    """Kolmogorov-Smirnov test against scipy's distribution, over ids and over columns."""
    ids = np.arange(20_000, dtype=np.int64) - 10_000
    values = initial_rows(KEYS, np.zeros(20_000, np.int64), ids, 6, 0.01)
    assert values.dtype == np.float32
    for column in range(6):
        assert stats.kstest(values[:, column], "norm", args=(0, 0.01)).pvalue > 1e-3
    assert np.abs(np.corrcoef(values.T) - np.eye(6)).max() < 0.03
    assert abs(np.corrcoef(values[1:, 0], values[:-1, 0])[0, 1]) < 0.03, "neighbouring ids"


@pytest.mark.parametrize("columns", [1, 5, 6])
def test_columns_do_not_depend_on_their_number(columns: int) -> None:
    ids, fields = np.arange(100, dtype=np.int64), np.zeros(100, np.int64)
    whole = initial_rows(KEYS[:100], fields, ids, 7, 1.0)
    np.testing.assert_array_equal(initial_rows(KEYS[:100], fields, ids, columns, 1.0), whole[:, :columns])


def test_tables_fields_and_ids_differ() -> None:
    drawn = {
        tuple(initial_rows(np.array([key], np.uint64), np.array([field]), np.array([number]), 2, 1.0)[0].tolist())
        for key in (1, 2)
        for field in (0, 1)
        for number in (-1, 5, 1 << 62)
    }
    assert len(drawn) == 12
    assert torch.isfinite(torch.tensor(list(drawn))).all()
