"""Checks that sections of a configuration share."""

from collections.abc import Collection, Sequence
from math import inf
from typing import Any

from cowrec.errors import UserError
from cowrec.names import hint


def require(key: str, value: Any, fits: bool, what: str) -> None:
    """Raises ValueError, with the key and the value, unless the value fits; ``what`` names those that do."""
    if not fits:
        raise UserError(f"{key} must be {what}, got {value!r}")


def require_at_least(section: str, config: Any, keys: str, least: int = 0) -> None:
    """Raises ValueError unless values of a section, by keys with spaces between, are at least ``least`` and finite."""
    for key in keys.split():
        value = getattr(config, key)
        finite = " and finite" if isinstance(value, float) else ""
        fits = value is None or (not isinstance(value, str) and least <= value < inf)
        require(f"{section}.{key}", value, fits, f"at least {least}{finite}")


def require_choices(flag: str, values: Sequence[Any], known: Collection[Any]) -> None:
    """Raises ValueError unless a flag has one value, or several different ones, all of which are known."""
    if unknown := [each for each in values if each not in known]:
        raise UserError(f"{flag} {unknown[0]!r} is not known; known: {', '.join(map(str, known))}")
    if not values or len(set(values)) < len(values):
        raise UserError(f"{flag} needs one value or several different ones, got {list(values)}")


def require_known(key: str, value: str, known: Collection[str]) -> None:
    """Raises ValueError for a value of ``key`` that is not known."""
    if value not in known:
        raise UserError(f"{key} = {value!r} is not known; {hint(value, known)}")
