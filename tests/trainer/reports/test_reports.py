"""Text tables and plots that commands share."""

import pytest

from cowrec.trainer.reports.plotting import plt, size_name
from cowrec.trainer.reports.text_table import aligned, speed_text


def test_a_table_aligns_names_left_and_numbers_right() -> None:
    assert aligned([["run", "AUC"], ["small batch", "0.8"], ["x", "0.8086"]]) == (
        "run             AUC\nsmall batch     0.8\nx            0.8086"
    )


def test_a_ragged_table_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        aligned([["run", "AUC"], ["small batch"]])


@pytest.mark.parametrize(("size", "name"), [(1024, "1K"), (131072, "128K"), (1 << 20, "1,024K"), (1000, "1,000")])
def test_batch_sizes_are_named_as_users_write_them(size: int, name: str) -> None:
    assert size_name(size) == name


def test_plots_need_no_display(tmp_path) -> None:
    figure, axis = plt.subplots()
    axis.plot([1, 2])
    figure.savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert plt.get_backend().lower() == "agg"


@pytest.mark.parametrize("unknown", [None, float("nan")])
def test_a_speed_that_was_not_measured_is_no_number(unknown: float | None) -> None:
    assert speed_text(12345.6) == "12,346 samples/s"
    assert speed_text(unknown) == "too few steps to measure the speed"
