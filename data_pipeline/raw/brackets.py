"""Lists and weights as programs write them in text.

JSON writes `["a", "b"]`, Python `['a', 'b']`, NumPy the same without commas, and Postgres `{a,"b c"}`. Weights by id
are `{"a": 0.5}`.
"""

import json
import re
from typing import Any

from .values import NUMBER

_QUOTED = r"""(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)')"""
_PLAIN = r"""([^\s,"'\[\]{}(][^,\[\]{}]*?)"""
_ITEM = re.compile(rf"""\s*(?:{_QUOTED}\s*(?:,|$|(?=["']))|{_PLAIN}\s*(?:,|$))""", re.DOTALL)
_WEIGHT = re.compile(rf"\s*(?:{_QUOTED}|([^\s,:\"'][^,:]*?))\s*:\s*({NUMBER[1:-1]})\s*(?:,|$)", re.DOTALL)
_NUMBERS = re.compile(r"[\s0-9.eE+-]+")
_NULLS = ("NULL", "null", "None", "nan", "NaN")


def items_of(text: str) -> list[Any]:
    """Returns the items of a list in brackets, trimmed; None where an item is missing.

    Raises:
        ValueError: the text is no such list.
    """
    text = text.strip()
    found = _json(text) if text.startswith("[") else None
    if found is not None:
        if any(isinstance(each, (list, dict)) for each in found):
            raise ValueError("a list within a list")
        return [each.strip() if isinstance(each, str) else each for each in found]
    inner = _inner(text, "[]", "{}", "()")
    if "," not in inner and _NUMBERS.fullmatch(inner):
        return list(inner.split())
    items: list[Any] = []
    for double, single, plain in _parts(_ITEM, inner):
        items.append(None if plain in _NULLS else plain or _unescaped(double or single or ""))
    return items


def weights_of(text: str) -> dict[str, float]:
    """Returns the weights by id that are written as an object. Raises ValueError if the text is none."""
    text = text.strip()
    inner = _inner(text, "{}")
    found = _json(text)
    if isinstance(found, dict) and all(type(each) in (int, float) for each in found.values()):
        return {name.strip(): float(weight) for name, weight in found.items()}
    parts = _parts(_WEIGHT, inner)
    return {
        plain or _unescaped(double or single or ""): float(weight or 0) for double, single, plain, weight, *_ in parts
    }


def _json(text: str) -> Any:
    """Returns the value of JSON; None of other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _inner(text: str, *brackets: str) -> str:
    if text[:1] + text[1:][-1:] not in brackets:
        raise ValueError(f"it has no brackets such as {brackets[0]}")
    return text[1:-1].strip()


def _parts(pattern: re.Pattern[str], text: str) -> list[tuple[str | None, ...]]:
    """Returns the groups of a pattern's matches, which must cover all text."""
    found, place = [], 0
    while place < len(text):
        match = pattern.match(text, place)
        if match is None:
            raise ValueError(f"not readable from {text[place : place + 20]!r} on")
        found.append(match.groups())
        place = match.end()
    return found


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL).strip()
