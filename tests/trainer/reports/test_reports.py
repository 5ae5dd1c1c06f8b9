"""Text tables and plots that commands share."""

import pytest

from cowrec.trainer.reports.plotting import size_name
from cowrec.trainer.reports.text_table import aligned, speed_text


def test_a_table_aligns_names_left_and_numbers_right() -> None:
    assert aligned([["run", "AUC"], ["small batch", "0.8"], ["x", "0.8086"]]) == (
        "run             AUC\nsmall batch     0.8\nx            0.8086"
    )


@pytest.mark.parametrize(("size", "name"), [(1024, "1K"), (131072, "128K"), (1 << 20, "1,024K"), (1000, "1,000")])
def test_batch_sizes_are_named_as_users_write_them(size: int, name: str) -> None:
    assert size_name(size) == name


@pytest.mark.parametrize("unknown", [None, float("nan")])
def test_a_speed_that_was_not_measured_is_no_number(unknown: float | None) -> None:
    assert speed_text(12345.6) == "12,346 samples/s"
    assert speed_text(unknown) == "too few steps to measure the speed"
