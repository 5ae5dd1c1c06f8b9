"""How counts are written: in flags, in ``--set``, and as text in TOML files."""

import re

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_count(text: str, key: str) -> int:
    """Reads a whole number with an optional unit: 64K is 65,536, for batch sizes, samples, rows and bytes alike.

    A unit is a power of 1,024 everywhere, since batch sizes, buffers and memory are powers of two, and one letter
    with two meanings would be misread.

    Args:
        text: digits, which underscores may group, and K, M, G or no unit.
        key: the flag or key that the text is the value of.

    Raises:
        ValueError: any other text.
    """
    found = re.fullmatch(r"(-?[0-9]+(?:_[0-9]+)*)([KMG]?)", text.strip(), flags=re.IGNORECASE)
    if not found:
        raise ValueError(
            f"{key} must be a whole number such as 512, 64K or 1M (K is 1,024, M is 1,024 K), got {text!r}"
        )
    return int(found[1]) * _UNITS[found[2].upper()]
