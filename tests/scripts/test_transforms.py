"""The comparison of transforms: what a lognormal column can lead to at best, and the table."""

from pathlib import Path

import numpy as np
import pytest

from scripts.preparing.transforms import table, write_lognormal


def test_the_clicks_follow_the_logarithm_of_the_amount(tmp_path: Path) -> None:
    """The expected AUC by numerical integration; the tolerance is four standard deviations of 20,000 samples."""
    best = write_lognormal(tmp_path / "raw.csv", 20_000)
    z = np.linspace(-6, 6, 2001)
    click = np.exp(-(z**2) / 2) / (1 + np.exp(1 - 2 * z))
    other = np.exp(-(z**2) / 2) - click
    below = (np.cumsum(other) - other / 2) / other.sum()
    assert best == pytest.approx(float((click * below).sum() / click.sum()), abs=0.01)
    amounts = np.loadtxt(tmp_path / "raw.csv", delimiter=",", skiprows=1, usecols=1)
    assert np.log(amounts).std() == pytest.approx(3, rel=0.03)


def test_the_table_has_means_over_seeds() -> None:
    lines = [
        {"data": "d", "transform": name, "seed": seed, "epochs": [{"auc": 0.5 + seed / 10}, {"auc": 0.7}]}
        for name in ("quantile", "minmax", "log", "buckets", "none")
        for seed in (0, 1)
    ]
    assert table(lines).splitlines()[1].split() == ["quantile", "55.00", "70.00"]
