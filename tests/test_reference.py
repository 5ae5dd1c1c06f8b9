"""docs/reference.md, which is made from the docstrings of the sections.

After a change of a key: python tests/test_reference.py > docs/reference.md
"""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from math import inf, nan
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import pytest

from cowrec.data_pipeline.raw import schema_file
from cowrec.data_pipeline.raw.layouts import RawField, RawLabel
from cowrec.trainer.config.reference import attribute_texts, keys_of
from cowrec.trainer.config.run import RunConfig
from cowrec.trainer.config.sections import TableIds

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, SCHEMA_FILE = DOCS / "reference.md", DOCS / "schema_file.toml"
HEAD = """# Reference: every key

This page is made from the docstrings of the code.

* [Run files](#run-files), for `cowrec train` and most other commands: `cowrec config init` writes one with all keys.
  `--set section.key=value` overrides a key. [train.md](train.md) explains how the keys work together.
* [Schema files](#schema-files), for `cowrec prepare tabular`: [data.md](data.md) explains them.

A key without a default has no effect unless it is set. A whole number may be text with a unit: `"64K"` is 65,536,
`"1M"` is 1,024 K, and `"1G"` is 1,024 M. `--set` and flags that are counts take the same units without quotes.

## Run files
"""


SCHEMA_NOTES = """\
An empty value is a missing value. With several labels, a missing label is unknown. A sample without its only label is a
bad row, and so is one without a time. A time is Unix seconds (rounded down) or ISO 8601 text, such as
"2014-10-21T07:00:00Z" or a date alone, in UTC unless it names a zone; or it is what its unit or format says.
"""

NAMES = {bool: "true or false", int: "whole number", float: "number", str: "text", Any: "any"}
PROBES: dict[Any, tuple[Any, ...]] = {int: (-2, -1, 0, 1 << 64), float: (-1.0, 0.0, 1.0, 2.0, inf, nan), str: ("?",)}
"""Values by type of which a check, if there is one, refuses one with a message that tells the range."""


class Entry(NamedTuple):
    """A key as the page shows it; the range is what its section's check requires, "" where it is not known."""

    name: str
    type: str
    range: str
    default: str
    text: str


def entries(kind: type) -> list[Entry]:
    hints = get_type_hints(kind)
    return [
        Entry(key.name, type_text(hints[key.name]), range_of(kind, key.name, hints[key.name]), key.default, key.text)
        for key in keys_of(kind)
    ]


def type_text(hint: Any) -> str:
    """A type in words."""
    if hint in NAMES:
        return NAMES[hint]
    inner, origin = get_args(hint), get_origin(hint)
    if origin in (Union, UnionType):
        return " or ".join(text for part in inner if part is not NoneType and (text := type_text(part)))
    if origin is Literal:
        return " or ".join(f'"{choice}"' for choice in inner if choice != "")
    if origin is tuple:
        plural = "" if get_origin(inner[0]) is Literal else "s"
        return f"list of {type_text(inner[0])}{plural}" + ("" if inner[-1] is ... else f", {len(inner)} of them")
    if origin is dict:
        return f"table of {type_text(inner[1])}"
    return "table"


def range_of(kind: type, name: str, hint: Any) -> str:
    """What the check of a section says about a value that it refuses."""
    return next(requirements(kind, name, hint), "")


def requirements(kind: type, name: str, hint: Any) -> Iterator[str]:
    inner = () if get_origin(hint) is dict else get_args(hint)
    scalar = next((found for found in (hint, *inner) if found in PROBES), None)
    for value in PROBES.get(scalar, ()):
        try:
            kind(**{name: [value] * len(inner) if get_origin(hint) is tuple else value})
        except ValueError as error:
            message = str(error)
            if not re.search(rf"\b{name}\b", message.partition(" must ")[0].partition(" is not known")[0]):
                continue
            found = re.search(r" must be (.+?),? got ", message) or re.search(r" is not known; known: (.+)$", message)
            if found:
                yield found[1].rstrip(";")


def table(keys: list[Entry]) -> Iterator[str]:
    """A line for each text, after the keys that it is about."""
    groups: dict[str, list[Entry]] = {}
    for key in keys:
        groups.setdefault(key.text, []).append(key)
    for text, own in groups.items():
        named = []
        for key in own:
            default = f"default `{key.default}`" if key.default else ""
            named.append(f"**`{key.name}`** ({'; '.join(filter(None, (key.type, key.range, default)))})")
        line = f"* {', '.join(named)}: {text}"
        yield textwrap.fill(line, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    yield ""


def sections() -> dict[str, type]:
    return {field.name: field.default_factory for field in dataclasses.fields(RunConfig)}


def of_schema_files() -> Iterator[str]:
    """The annotated example, and the keys of fields and labels."""
    yield "## Schema files\n\nAll keys, with examples of values:\n"
    yield f"```toml\n{SCHEMA_FILE.read_text(encoding='utf-8')}```\n"
    yield SCHEMA_NOTES
    for title, kind, known in (
        ("Keys of a field, in `[[fields]]`", RawField, schema_file._FIELD_TYPES),
        ("Keys of a label, in `label` and `labels`", RawLabel, schema_file._LABEL_TYPES),
    ):
        texts = attribute_texts(kind)
        hints = inspect.get_annotations(kind, eval_str=True)
        yield f"### {title}\n"
        yield from table([Entry(name, type_text(hints[name]), "", "", texts[name]) for name in known])


def page() -> str:
    parts = [HEAD]
    for name, kind in sections().items():
        first = " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())
        first = re.sub(r"^`\[\w+\]`[:;]? ?", "", first)
        parts += [
            f"### `[{name}]`\n",
            first[:1].upper() + first[1:] + "\n",
            *table(entries(kind)),
        ]
        if name == "id_table":
            text = attribute_texts(TableIds)["fields"]
            parts += ["In `[id_table.tables.NAME]` every key above but `tables`, for one table, and:\n"]
            parts += table([Entry("fields", "list of texts", "", "", text)])
    parts += of_schema_files()
    return (
        re.sub(r"(?<!`)``([^`]+)``(?!`)", r"`\1`", re.sub(r":\w+:`(~?[\w.]+)`", r"`\1`", "\n".join(parts))).rstrip()
        + "\n"
    )


def test_the_page_is_made_from_the_docstrings() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tests/test_reference.py > docs/reference.md"


@pytest.mark.parametrize("section", sections())
def test_every_key_is_described_and_every_description_has_its_key(section: str) -> None:
    kind = sections()[section]
    assert {key.name for key in keys_of(kind)} == set(attribute_texts(kind))


def test_the_example_of_schema_files_has_every_key() -> None:
    text = SCHEMA_FILE.read_text(encoding="utf-8")
    for name in {*schema_file._TYPES, *schema_file._FIELD_TYPES, *schema_file._LABEL_TYPES}:
        assert re.search(rf"\b{name}\b", text), name


if __name__ == "__main__":
    print(page(), end="")
