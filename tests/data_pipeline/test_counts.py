"""Counts with units."""

import pytest

from cowrec.data_pipeline.counts import parse_count


@pytest.mark.parametrize(
    ("text", "number"),
    [("512", 512), ("64K", 65536), (" 64k", 65536), ("1_000", 1000), ("1M", 1 << 20), ("4G", 1 << 32), ("-1", -1)],
)
def test_units_are_powers_of_1024(text: str, number: int) -> None:
    assert parse_count(text, "--rows") == number


@pytest.mark.parametrize("text", ["", "K", "8Q", "1.5K", "8KB", "1e6", "1,000", "_1", "2 K"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--rows must be a whole number such as 512, 64K or 1M \(K is 1,024, M is"):
        parse_count(text, "--rows")
