"""The keys of a configuration with their defaults and descriptions, from their dataclasses, and run files of them."""

import dataclasses
import inspect
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

import tomli_w

from cowrec.errors import UserError
from cowrec.names import hint as hint_at

from .run import RunConfig

OWN_DATA = "own-data"
_SHIPPED = Path(__file__).parents[1] / "configs"
_WIDTH = 110
_HEAD = """\
A run file of cowrec. Keys that are commented out have their default; remove the # to change one.
A key without a value has no effect unless it is set. Counts may have a unit, in quotes: "64K" is 65,536, "1M" 1,024 K.
"""
_OWN_DATA = """\
  cowrec prepare tabular --schema columns.toml --config run.toml --input clicks.parquet --output data/clicks
  cowrec train run.toml --data data/clicks --run-dir runs/clicks
"""


@dataclass(frozen=True)
class Key:
    """One key of a section: its default as TOML, "" without one, and its description, which several keys may share."""

    name: str
    default: str
    text: str


def keys_of(kind: type) -> list[Key]:
    """Returns the keys of a section, a dataclass that describes all of them."""
    texts = attribute_texts(kind)
    return [Key(field.name, _default(field), texts[field.name]) for field in dataclasses.fields(kind)]


def attribute_texts(kind: type) -> dict[str, str]:
    """Returns the entries of the "Attributes:" of a docstring, by name, each as one paragraph."""
    _, _, attributes = (inspect.getdoc(kind) or "").partition("Attributes:\n")
    entries = re.split(r"^    (?=\w+(?:, \w+)*: )", attributes, flags=re.MULTILINE)[1:]
    found: dict[str, str] = {}
    for entry in entries:
        names, _, text = entry.partition(": ")
        paragraph = re.split(r"\n(?=\S|\n)", text)[0]  # text below the list is no part of its last entry
        found |= dict.fromkeys(names.split(", "), " ".join(paragraph.split()))
    return found


def toml_text(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {toml_text(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_text, value))}]"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").strip()


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    return "" if value is None or value is dataclasses.MISSING else toml_text(value)


def presets() -> list[str]:
    """Lists the shipped configurations, as ``--for`` takes them: those of a folder as FOLDER/NAME."""
    names = (file.relative_to(_SHIPPED).with_suffix("").as_posix() for file in _SHIPPED.rglob("*.toml"))
    return [OWN_DATA, *sorted(name for name in names if not name.endswith("_schema"))]


def run_file(preset: str = OWN_DATA) -> str:
    """Writes a run file. Raises UserError if there is no such preset."""
    if preset not in presets():
        raise UserError(f"--for {preset!r} is not known; {hint_at(preset, presets())}")
    above, values = _HEAD + "\n" + _OWN_DATA, dict[str, Any]()
    if preset != OWN_DATA:
        text = (_SHIPPED / f"{preset}.toml").read_text(encoding="utf-8")
        notes = [line[2:] for line in text.split("\n\n")[0].splitlines() if line[:1] == "#"]
        above = (_HEAD + "\n" + "\n".join(notes)).replace(f"trainer/configs/{preset}.toml", "run.toml")
        values = tomllib.loads(text)
    parts = ["\n".join(f"# {line}".rstrip() for line in above.rstrip().splitlines())]
    for section in dataclasses.fields(RunConfig):
        assert isinstance(section.default_factory, type)
        lines = _lines(keys_of(section.default_factory), values.get(section.name, {}))
        parts.append("\n".join([f"[{section.name}]", *lines]))
    return "\n\n".join(parts) + "\n"


def _lines(keys: list[Key], values: Mapping[str, Any]) -> Iterator[str]:
    """Yields the keys of a section below their descriptions; keys that share one follow each other."""
    described = ""
    for key in keys:
        if key.text != described:
            text = f"{key.text[:1].upper()}{key.text[1:]}"
            yield from (f"# {line}" for line in wrap(text, _WIDTH, break_on_hyphens=False))
            described = key.text
        if key.name in values:
            yield f"{key.name} = {toml_text(values[key.name])}"
        else:
            yield f"# {key.name} = {key.default}".rstrip()
