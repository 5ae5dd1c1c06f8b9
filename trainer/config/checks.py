"""The check that sections of a configuration share."""

from typing import Any


def require(key: str, value: Any, fits: bool, what: str) -> None:
    """Raises ValueError, with the key and the value, unless the value fits; ``what`` names those that do."""
    if not fits:
        raise ValueError(f"{key} must be {what}, got {value!r}")
