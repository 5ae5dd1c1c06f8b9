"""Text tables and numbers for the terminal."""

from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Aligns a table: the first column to the left, the others to the right, with two spaces between columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )


def quality_tables(values: Mapping[str, Any]) -> str:
    """Formats what `evaluate` returns: a line for each measure, and for each column a table of its groups."""
    tables = [aligned([[name, number_text(value)] for name, value in values.items() if isinstance(value, int | float)])]
    for column, found in values.get("by", {}).items():
        groups = [*found["largest"], *[{"id": "(the rest)", **(found["rest"] or {})}] * bool(found["rest"])]
        measures = ("rows", "ctr", "auc", "logloss", "calibration")
        rows = [[group["id"], *(number_text(group.get(name)) for name in measures)] for group in groups]
        names = (("GAUC", "gauc"), ("NDCG", "ndcg"), ("MRR", "mrr"))
        ranked = "  ".join(f"{name} {number_text(found[key])}" for name, key in names)
        counted = f"by {column}: {found['groups_in_gauc']:,} of {found['groups']:,} groups have both classes"
        tables.append(f"{ranked}  {counted}\n{aligned([[column, *measures], *rows])}")
    if importance := values.get("importance"):
        changes = [[name, *map(number_text, change.values())] for name, change in importance.items()]
        tables.append(aligned([["permuted", "auc_drop", "logloss_rise"], *changes]))
    return "\n\n".join(tables)


def number_text(value: float | None, form: str = ".4f") -> str:
    """Formats a measure in ``form``, a count with commas, and an unknown value as "-"."""
    return "-" if value is None or isnan(value) else f"{value:,}" if isinstance(value, int) else f"{value:{form}}"


def speed_text(samples_per_second: float | None) -> str:
    """Formats a run's speed; it is NaN or None where the first step, which compiles kernels, was the only one."""
    if samples_per_second is None or isnan(samples_per_second):
        return "too few steps to measure the speed"
    return f"{samples_per_second:,.0f} samples/s"
