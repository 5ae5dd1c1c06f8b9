"""The values of ``--set``: section.key=value over a configuration."""

import tomllib
from typing import Any


def apply_override(sections: dict[str, Any], override: str) -> None:
    """Sets ``section.key`` of nested sections to a TOML value, or to the text itself where it is no TOML.

    Raises:
        ValueError: not of the form section.key=value, or the section is a value.
    """
    path, equals, text = override.partition("=")
    section, dot, key = path.strip().partition(".")
    if not equals or not dot or not key:
        raise ValueError(f"--set takes section.key=value, got {override!r}; for example --set train.batch_size=8192")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    values = sections.setdefault(section.strip(), {})
    if not isinstance(values, dict):
        raise ValueError(f"--set {override}: {section} = {values!r} in the file is not a section")
    values[key.strip()] = value
