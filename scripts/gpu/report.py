"""Report of the GPU check: speeds, their targets and a table, from the benchmark's lines."""

import re
from collections.abc import Sequence
from typing import Any

Lines = Sequence[dict[str, Any]]

MAX_MINUTES = {128 * 1024: 0.5, 1024: 15.0}
"""Target for 10 epochs with exact replay and CowClip, by batch size; the paper's V100 took 9 and 768 minutes."""
MAX_CLIP_RATIO = {128 * 1024: 1.05}
"""Target for the ratio of step times with and without CowClip, with exact replay, by batch size."""
MIN_ROOFLINE_SHARE = {128 * 1024: 0.5}
"""Target for the roofline's time over the time of a step, with exact replay and CowClip, by batch size."""
_HEAD = ("mode", "batch", "clip", "samples/s", "step ms", "10 epochs min", "on/off", "roofline", "host ms", "kernels")


def speeds(lines: Lines) -> list[dict[str, Any]]:
    """Returns the speed of each measured line, its ratio of step times with and without the clip, and its share."""
    measured = [line for line in lines if "error" not in line]
    unclipped = {_combination(line): line["step_ms"] for line in measured if line["clip"] == "off"}
    found = []
    for line in measured:
        without = unclipped.get(_combination(line))
        keys = ("mode", "batch_size", "clip", "precision", "samples_per_second", "minutes_of_10_epochs", "step_ms")
        found.append(
            {
                **{key: line[key] for key in keys},
                "step_over_unclipped": line["step_ms"] / without if without else None,
                "roofline_share": line["roofline"]["step_ms"] / line["step_ms"],
                **{key: line[key] for key in ("host_ms", "kernels", "captured")},
            }
        )
    return found


def targets(lines: Lines) -> list[dict[str, Any]]:
    """Compares each target with its measurement (None: not measured)."""
    replay = {each["batch_size"]: each for each in speeds(lines) if (each["mode"], each["clip"]) == ("replay", "on")}
    wanted = (
        ("minutes_of_10_epochs", "most", MAX_MINUTES),
        ("step_over_unclipped", "most", MAX_CLIP_RATIO),
        ("roofline_share", "least", MIN_ROOFLINE_SHARE),
    )
    found = []
    for what, bound, by_batch_size in wanted:
        for batch_size, limit in by_batch_size.items():
            measured = replay.get(batch_size, {}).get(what)
            met = measured is not None and (measured <= limit if bound == "most" else measured >= limit)
            found.append({"what": what, "batch_size": batch_size, bound: limit, "measured": measured, "met": met})
    return found


def has_target(mode: str, batch_size: int) -> bool:
    """True if a combination of this mode and batch size, with the clip on or off, is part of a target."""
    return mode == "replay" and batch_size in MAX_MINUTES


def slug(device: str) -> str:
    """Converts a device's name to a folder name: ``NVIDIA H100 80GB HBM3`` is ``nvidia_h100_80gb_hbm3``."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")


def summary(result: dict[str, Any]) -> str:
    """Returns a table of the speeds, the targets, the parts, and what failed or was not reached."""
    rows = [_HEAD, *map(_cells, result["speeds"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    for target in result["aims"]:
        measured = "not measured" if target["measured"] is None else f"{target['measured']:.3g}"
        bound = "at most" if "most" in target else "at least"
        limit = target.get("most", target.get("least"))
        outcome = "met" if target["met"] else "NOT met"
        lines.append(f"{target['what']} at batch {target['batch_size']}: {measured}, {bound} {limit:g}: {outcome}")
    for line in result["kernels"]:
        times = ", ".join(f"{kernel} {ms:.3f} ms" for kernel, ms in line["ms"].items())
        lines.append(f"kernels alone at batch {line['batch_size']}, clip {line['clip']}: {times}")
    for name, part in result["parts"].items():
        lines.append(f"{name}: {'passed' if part['passed'] else part.get('why', 'FAILED')}")
    for line in result["bench"]:
        if "error" in line:
            lines.append(f"{line['mode']}, batch {line['batch_size']}, clip {line['clip']}: {line['error']}")
    lines += [f"not reached: {each['what']}: {each['why']}" for each in result["not_reached"]]
    return "\n".join(lines)


def _cells(speed: dict[str, Any]) -> tuple[str, ...]:
    ratio, kernels = speed["step_over_unclipped"], speed["kernels"]
    return (
        speed["mode"],
        str(speed["batch_size"]),
        speed["clip"],
        f"{speed['samples_per_second']:,.0f}",
        f"{speed['step_ms']:.2f}",
        f"{speed['minutes_of_10_epochs']:,.2f}",
        "-" if ratio is None else f"{ratio:.3f}",
        f"{speed['roofline_share']:.0%}",
        f"{speed['host_ms']:.2f}",
        ("-" if kernels is None else f"{kernels:.0f}") + (" (graph)" if speed["captured"] else ""),
    )


def _combination(line: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the settings that two lines share if they differ only in the clip."""
    return line["mode"], line["batch_size"], line["precision"]
