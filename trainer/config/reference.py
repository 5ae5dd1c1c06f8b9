"""The keys of a configuration with their types, defaults and ranges, as their dataclasses describe them."""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, nan
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tomli_w

_NAMES = {bool: "true or false", int: "whole number", float: "number", str: "text", Any: "any"}
_PROBES: dict[Any, tuple[Any, ...]] = {int: (-2, -1, 0, 1 << 64), float: (-1.0, 0.0, 1.0, 2.0, inf, nan), str: ("?",)}
"""Values by type of which a check, if there is one, refuses one with a message that tells the range."""


@dataclass(frozen=True)
class Key:
    """One key of a section.

    Attributes:
        name: of the key.
        type: in words.
        default: as TOML; "" if the key has no value unless it is set.
        range: what the section's check requires; "" where it is not known.
        text: what the key does. Keys that are described together have the same.
    """

    name: str
    type: str
    default: str
    range: str
    text: str


def keys_of(kind: type) -> list[Key]:
    """The keys of a section, a dataclass.

    Raises:
        ValueError: a field has no entry in the docstring's "Attributes:".
    """
    texts, hints = attribute_texts(kind), get_type_hints(kind)
    missing = [each.name for each in dataclasses.fields(kind) if each.name not in texts]
    if missing:
        raise ValueError(f'{kind.__name__} does not describe {", ".join(missing)}; add them to its "Attributes:"')
    return [
        Key(
            each.name,
            type_text(hints[each.name]),
            _default(each),
            _range(kind, each.name, hints[each.name]),
            texts[each.name],
        )
        for each in dataclasses.fields(kind)
    ]


def attribute_texts(kind: type) -> dict[str, str]:
    """Entries of the "Attributes:" of a docstring, by name, each as one paragraph."""
    _, _, attributes = (inspect.getdoc(kind) or "").partition("Attributes:\n")
    entries = re.split(r"^    (?=\w+(?:, \w+)*: )", attributes, flags=re.MULTILINE)[1:]
    found: dict[str, str] = {}
    for entry in entries:
        names, _, text = entry.partition(": ")
        paragraph = re.split(r"\n(?=\S|\n)", text)[0]  # text below the list is no part of its last entry
        found |= dict.fromkeys(names.split(", "), " ".join(paragraph.split()))
    return found


def type_text(hint: Any) -> str:
    """A type in words."""
    if hint in _NAMES:
        return _NAMES[hint]
    inner, origin = get_args(hint), get_origin(hint)
    if origin in (Union, UnionType):
        return " or ".join(text for each in inner if each is not NoneType and (text := type_text(each)))
    if origin is Literal:
        return " or ".join(f'"{each}"' for each in inner if each != "")
    if origin is tuple:
        plural = "" if get_origin(inner[0]) is Literal else "s"
        return f"list of {type_text(inner[0])}{plural}" + ("" if inner[-1] is ... else f", {len(inner)} of them")
    if origin is dict:
        return f"table of {type_text(inner[1])}"
    return "table"


def toml_text(value: Any) -> str:
    """A value as TOML in one line."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {toml_text(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_text, value))}]"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").strip()


def _default(field: dataclasses.Field) -> str:
    value = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    return "" if value is None or value is dataclasses.MISSING else toml_text(value)


def _range(kind: type, name: str, hint: Any) -> str:
    """What the check of a section says about a value that it refuses."""
    return next(_requirements(kind, name, hint), "")


def _requirements(kind: type, name: str, hint: Any) -> Iterator[str]:
    inner = () if get_origin(hint) is dict else get_args(hint)
    scalar = next((each for each in (hint, *inner) if each in _PROBES), None)
    for value in _PROBES.get(scalar, ()):
        try:
            kind(**{name: [value] * len(inner) if get_origin(hint) is tuple else value})
        except ValueError as error:
            message = str(error)
            if not re.search(rf"\b{name}\b", message.partition(" must ")[0].partition(" is not known")[0]):
                continue
            found = re.search(r" must be (.+?),? got ", message) or re.search(r" is not known; known: (.+)$", message)
            if found:
                yield found[1].rstrip(";")
