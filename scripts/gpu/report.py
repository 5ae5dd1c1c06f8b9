"""Report of the GPU check: what each part found, and speeds beside their targets, from the lines of its results."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

Lines = Sequence[dict[str, Any]]

MAX_MINUTES = {128 * 1024: 0.5, 1024: 15.0}
"""Target for 10 epochs with exact replay and CowClip, by batch size; the paper's V100 took 9 and 768 minutes."""
MAX_CLIP_RATIO = {128 * 1024: 1.05}
"""Target for the ratio of step times with and without CowClip, with exact replay, by batch size."""
MIN_ROOFLINE_SHARE = {128 * 1024: 0.5}
"""Target for the roofline's time over the time of a step, with exact replay and CowClip, by batch size."""
_IDENTITY = ("part", "mode", "batch_size", "clip", "precision")
_HEAD = (*_IDENTITY, "samples/s", "step ms", "10 epochs min", "on/off", "roofline", "host ms", "kernels")
_MOST_KERNELS = 15


def speeds(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the figures of each timed combination, of its latest run, joined from its lines.

    Adds ``step_over_unclipped``, the ratio of its time to that without the clip, and ``roofline_share``; None where
    they are not known.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in lines:
        if "batch_size" in line and "kernels_of_a_step" not in line:
            key = tuple(line[each] for each in _IDENTITY)
            begins = "step_ms" in line or key not in found
            found[key] = dict(line) if begins else {**found[key], **line}
    timed = [each for each in found.values() if "step_ms" in each]
    unclipped = {_setting(each): each["step_ms"] for each in timed if each["clip"] == "off"}
    for each in timed:
        without = unclipped.get(_setting(each))
        each["step_over_unclipped"] = each["step_ms"] / without if without else None
        floor = each.get("roofline")
        each["roofline_share"] = floor["step_ms"] / each["step_ms"] if floor else None
    return timed


def _setting(speed: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the settings that two combinations share if they differ only in the clip."""
    return speed["mode"], speed["batch_size"], speed["precision"], speed["captured"]


def targets(found: Lines) -> list[dict[str, Any]]:
    """Compares each target with the speed of captured steps (None: not measured)."""
    captured = {each["batch_size"]: each for each in found if each["part"] == "graph"}
    wanted = (
        ("minutes_of_10_epochs", "most", MAX_MINUTES),
        ("step_over_unclipped", "most", MAX_CLIP_RATIO),
        ("roofline_share", "least", MIN_ROOFLINE_SHARE),
    )
    compared = []
    for what, bound, by_batch_size in wanted:
        for batch_size, limit in by_batch_size.items():
            measured = captured.get(batch_size, {}).get(what)
            met = measured is not None and (measured <= limit if bound == "most" else measured >= limit)
            compared.append({"what": what, "batch_size": batch_size, bound: limit, "measured": measured, "met": met})
    return compared


def slug(device: str) -> str:
    """Converts a device's name to a folder name: ``NVIDIA H100 80GB HBM3`` is ``nvidia_h100_80gb_hbm3``."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")


def summary(lines: Lines) -> str:
    """Returns the checks, tables of speeds and kernels, the targets, and how the parts ended."""
    text = []
    for line in lines:
        if "check" in line:
            text.append(f"{line['part']}, {line['check']}: {'equal' if line['equal'] else 'NOT EQUAL'}")
        if "case" in line:
            time = (
                "not timed"
                if line["us"] is None
                else f"{line['us']:.0f} us, {line['ns_of_longest_turn']:.0f} ns a turn"
            )
            text.append(f"{line['part']}, {line['case']}: {time}, {_turns(line)}")
    found = speeds(lines)
    rows = [_HEAD, *map(_cells, found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    for line in lines:
        if "kernels_of_a_step" in line:
            text.append(f"batch {line['batch_size']}: kernels take {line['kernels_us']:.0f} us a step, of which")
            for row in line["kernels_of_a_step"][:_MOST_KERNELS]:
                text.append(f"{row['us']:10.1f} us {row['count']:6.1f} x {row['kernel']}")
            if "replay" in line:
                text.append(f"replay of the next batch: {_turns(line['replay'])}")
        if "error" in line and "batch_size" in line:
            text.append(f"{line['part']}, batch {line['batch_size']}, clip {line['clip']}: {line['error']}")
    for target in targets(found):
        measured = "not measured" if target["measured"] is None else f"{target['measured']:.3g}"
        bound = "at most" if "most" in target else "at least"
        limit = target.get("most", target.get("least"))
        outcome = "met" if target["met"] else "NOT met"
        text.append(f"{target['what']} at batch {target['batch_size']}: {measured}, {bound} {limit:g}: {outcome}")
    for name, ended in outcomes(lines).items():
        text.append(f"{name}: {ended['outcome']}{': ' if ended['why'] else ''}{ended['why']}")
    return "\n".join(text)


def _turns(counts: dict[str, Any]) -> str:
    return f"{counts['turns']:,} turns, {counts['longest']:,} in the longest program"


def outcomes(lines: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns how each part ended that was run, at its latest run."""
    return {line["part"]: line for line in lines if "outcome" in line}


def _cells(speed: dict[str, Any]) -> tuple[str, ...]:
    ratio, share, kernels = speed["step_over_unclipped"], speed["roofline_share"], speed.get("kernels")
    minutes = speed.get("minutes_of_10_epochs")
    return (
        *(str(speed[key]) for key in _IDENTITY),
        f"{speed['samples_per_second']:,.0f}",
        f"{speed['step_ms']:.2f}",
        "-" if minutes is None else f"{minutes:,.2f}",
        "-" if ratio is None else f"{ratio:.3f}",
        "-" if share is None else f"{share:.0%}",
        f"{speed['host_ms']:.2f}",
        ("-" if kernels is None else f"{kernels:.0f}") + (" (graph)" if speed["captured"] else ""),
    )
