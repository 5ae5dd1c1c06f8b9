"""What users write: names that may be misspelt, counts such as 64K, and checks of values of flags and of TOML files."""

import re
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from math import inf
from typing import Any

from cowrec.errors import SettingError, UserError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_count(text: str, key: str) -> int:
    """Reads a whole number with an optional unit: 64K is 65,536, for batch sizes, samples, rows and bytes alike.

    Raises UserError for any other text than digits, which underscores may group, and K, M, G or no unit; it names the
    flag or key whose value the text is.
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


def require(key: str, value: Any, fits: bool, what: str, *others: str) -> None:
    """Raises SettingError unless the value fits; ``what`` names such values, ``others`` keys that they depend on."""
    if not fits:
        raise SettingError(f"{key} must be {what}, got {value!r}", key, *others)


def require_at_least(section: str, config: Any, keys: str, least: int = 0) -> None:
    """Raises SettingError unless the values of a section's keys are at least ``least`` and finite."""
    for key in keys.split():
        value = getattr(config, key)
        finite = " and finite" if isinstance(value, float) else ""
        fits = value is None or (not isinstance(value, str) and least <= value < inf)
        require(f"{section}.{key}", value, fits, f"at least {least}{finite}")


def require_choices(flag: str, values: Sequence[Any], known: Collection[Any]) -> None:
    """Raises UserError unless a flag has one value, or several different ones, all of which are known."""
    if unknown := [value for value in values if value not in known]:
        raise UserError(f"{flag} {unknown[0]!r} is not known; known: {', '.join(map(str, known))}")
    if not values or len(set(values)) < len(values):
        raise UserError(f"{flag} needs one value or several different ones, got {list(values)}")


def require_known(key: str, value: str, known: Collection[str]) -> None:
    """Raises SettingError for a value of ``key`` that is not known."""
    if value not in known:
        raise SettingError(f"{key} = {value!r} is not known; {hint(value, known)}", key)
