"""What users write: names that may be misspelt, and counts such as 64K in flags, in ``--set`` and in TOML files."""

import re
from collections.abc import Iterable
from difflib import get_close_matches

from cowrec.errors import UserError

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
        raise UserError(f"{key} must be a whole number such as 512, 64K or 1M (K is 1,024, M is 1,024 K), got {text!r}")
    return int(found[1]) * _UNITS[found[2].upper()]


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that is most like ``name``, or None if no name is."""
    return next(iter(get_close_matches(name, list(known), n=1, cutoff=0.5)), None)


def hint(name: str, known: Iterable[str], otherwise: str = "known") -> str:
    """Returns ``did you mean 'NEAREST'?``, or ``OTHERWISE: NAME, NAME, ...`` if no known name is like ``name``."""
    known = list(known)
    nearest = nearest_name(name, known)
    return f"{otherwise}: {', '.join(known)}" if nearest is None else f"did you mean {nearest!r}?"
