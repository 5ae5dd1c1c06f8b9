"""The values of ``--set``: section.key=value over a configuration."""

import tomllib
from collections.abc import Callable, Sequence
from typing import Any


def apply_override(sections: dict[str, Any], override: str) -> None:
    """Sets ``section.key`` of nested sections to a TOML value, or to the text itself where it is no TOML.

    Raises:
        ValueError: not of the form section.key=value, or the section is a value.
    """
    path, equals, text = override.partition("=")
    *tables, key = (part.strip() for part in path.split("."))
    if not equals or not tables or not all((*tables, key)):
        raise ValueError(f"--set takes section.key=value, got {override!r}; for example --set train.batch_size=8192")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    values = sections
    for depth, table in enumerate(tables, 1):
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise ValueError(f"--set {override}: {'.'.join(tables[:depth])} = {values!r} in the file is not a section")
    values[key] = value


def needed_for(error: str, overrides: Sequence[str], outcome: Callable[[Sequence[str]], object]) -> list[str]:
    """The overrides without any one of which ``error`` would not occur; none where the file alone has the error.

    Args:
        error: message about the file with all overrides.
        overrides: values of ``--set``.
        outcome: of the file with some of the overrides, a message or something else.
    """
    without = {index: outcome([*overrides[:index], *overrides[index + 1 :]]) for index in range(len(overrides))}
    repaired = [index for index, result in without.items() if not isinstance(result, str)]
    # Another error may be hidden by this one, and an override may repair an error of the file.
    changed = repaired or [index for index, result in without.items() if result != error]
    return [overrides[index] for index in changed]
