"""Run files to begin with: every key with its description, those of a preset set, all others commented out."""

import dataclasses
import tomllib
from collections.abc import Iterator, Mapping
from importlib.resources import files
from textwrap import wrap
from typing import Any

from .nearest_name import hint
from .reference import Key, keys_of, toml_text
from .run import RunConfig

OWN_DATA = "own-data"
_WIDTH = 110
_HEAD = """\
A run file of cowrec. Keys that are commented out have their default; remove the # to change one.
A key without a value has no effect unless it is set. Counts may have a unit, in quotes: "64K" is 65,536, "1M" 1,024 K.
"""
_OWN_DATA = """\
  cowrec prepare tabular --schema columns.toml --config run.toml --input clicks.parquet --output data/clicks
  cowrec train run.toml --data data/clicks --run-dir runs/clicks
"""


def presets() -> list[str]:
    """Names of the shipped configurations, as ``--for`` takes them: those of a folder as FOLDER/NAME."""
    folder = files("cowrec.trainer").joinpath("configs")
    inner = [(f"{each.name}/", each) for each in folder.iterdir() if each.is_dir()]
    shipped = (f"{prefix}{each.name}" for prefix, parent in [("", folder), *inner] for each in parent.iterdir())
    names = (name.removesuffix(".toml") for name in shipped if name.endswith(".toml"))
    return [OWN_DATA, *sorted(name for name in names if not name.endswith("_schema"))]


def run_file(preset: str = OWN_DATA) -> str:
    """The text of a run file.

    Args:
        preset: one of :func:`presets`.

    Raises:
        ValueError: there is no such preset.
    """
    if preset not in presets():
        raise ValueError(f"--for {preset!r} is not known; {hint(preset, presets())}")
    above, values = _HEAD + "\n" + _OWN_DATA, dict[str, Any]()
    if preset != OWN_DATA:
        text = files("cowrec.trainer").joinpath("configs", f"{preset}.toml").read_text(encoding="utf-8")
        notes = [
            line.removeprefix("#").removeprefix(" ") for line in text.split("\n\n")[0].splitlines() if line[:1] == "#"
        ]
        above = (_HEAD + "\n" + "\n".join(notes)).replace(f"trainer/configs/{preset}.toml", "run.toml")
        values = tomllib.loads(text)
    parts = ["\n".join(f"# {line}".rstrip() for line in above.rstrip().splitlines())]
    for each in dataclasses.fields(RunConfig):
        assert isinstance(each.default_factory, type)
        parts.append("\n".join([f"[{each.name}]", *_lines(keys_of(each.default_factory), values.get(each.name, {}))]))
    return "\n\n".join(parts) + "\n"


def _lines(keys: list[Key], values: Mapping[str, Any]) -> Iterator[str]:
    """The keys of a section, each below its description; keys that share one follow each other."""
    described = ""
    for key in keys:
        if key.text != described:
            yield from (
                f"# {line}" for line in wrap(f"{key.text[:1].upper()}{key.text[1:]}", _WIDTH, break_on_hyphens=False)
            )
            described = key.text
        if key.name in values:
            yield f"{key.name} = {toml_text(values[key.name])}"
        else:
            yield f"# {key.name} = {key.default}".rstrip()
