"""Checks that sections of a configuration share."""

from collections.abc import Collection, Sequence
from math import inf
from typing import Any

from cowrec.errors import UserError
from cowrec.names import hint


class SettingError(UserError):
    """A value of a configuration that cannot be used.

    Attributes:
        keys: what the error is about: keys such as "train.epochs", or a section.
    """

    def __init__(self, message: str, *keys: str) -> None:
        super().__init__(message)
        self.keys = keys


def require(key: str, value: Any, fits: bool, what: str, *others: str) -> None:
    """Raises SettingError, with the key and the value, unless the value fits.

    Args:
        what: names the values that fit.
        others: keys on whose values that depends.
    """
    if not fits:
        raise SettingError(f"{key} must be {what}, got {value!r}", key, *others)


def require_at_least(section: str, config: Any, keys: str, least: int = 0) -> None:
    """Raises SettingError unless values of a section, keys with spaces between, are at least ``least`` and finite."""
    for key in keys.split():
        value = getattr(config, key)
        finite = " and finite" if isinstance(value, float) else ""
        fits = value is None or (not isinstance(value, str) and least <= value < inf)
        require(f"{section}.{key}", value, fits, f"at least {least}{finite}")


def require_choices(flag: str, values: Sequence[Any], known: Collection[Any]) -> None:
    """Raises UserError unless a flag has one value, or several different ones, all of which are known."""
    if unknown := [each for each in values if each not in known]:
        raise UserError(f"{flag} {unknown[0]!r} is not known; known: {', '.join(map(str, known))}")
    if not values or len(set(values)) < len(values):
        raise UserError(f"{flag} needs one value or several different ones, got {list(values)}")


def require_known(key: str, value: str, known: Collection[str]) -> None:
    """Raises SettingError for a value of ``key`` that is not known."""
    if value not in known:
        raise SettingError(f"{key} = {value!r} is not known; {hint(value, known)}", key)
