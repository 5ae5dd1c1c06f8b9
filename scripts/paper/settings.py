"""Checks the settings of `scripts/reproduce_paper.sh` before it works: each value, and those that OUTPUT began with.

OUTPUT/settings.json keeps what all runs of an OUTPUT share: the input file, REPRODUCE_MIN_COUNT and REPRODUCE_EPOCHS.
"""

import json
import os
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from cowrec.files import replace_file
from cowrec.models import MODELS
from cowrec.names import parse_count
from cowrec.sparse_opt import SCALING_RULES
from cowrec.trainer.cli.flags import parse_list

SETTINGS = "settings.json"


def check(settings: Mapping[str, str]) -> None:
    """Raises ValueError for the first of the REPRODUCE_ variables whose value is not allowed."""

    def require(name: str, right: Callable[[str], bool], allowed: str) -> None:
        value = settings[f"REPRODUCE_{name}"]
        if not right(value):
            raise ValueError(f"REPRODUCE_{name} is {value!r}, but must be {allowed}")

    models, rules = ", ".join(MODELS), ", ".join(SCALING_RULES)
    require("MODELS", lambda text: _named(text.split(), MODELS), f"different ones of {models}, separated by spaces")
    require("BATCHES", _batch_sizes, "different numbers, with K for 1024, separated by spaces, such as 512 8K")
    require(
        "BASELINE",
        lambda text: _named(parse_list(text), SCALING_RULES),
        f"different ones of {rules}, separated by commas",
    )
    for name in ("EPOCHS", "SEEDS", "MIN_COUNT"):
        require(name, lambda text: text.isdecimal() and int(text) >= 1, "a whole number of at least 1")


def _named(names: list[str], known: Collection[str]) -> bool:
    return _different(names) and all(name in known for name in names)


def _batch_sizes(text: str) -> bool:
    try:
        sizes = [parse_count(each, "a batch size") for each in text.split()]
    except ValueError:
        return False
    return _different(sizes) and min(sizes) >= 1


def _different(values: list[Any]) -> bool:
    return 0 < len(values) == len(set(values))


def keep(train: Path, output: Path, settings: Mapping[str, str]) -> None:
    """Writes OUTPUT/settings.json, or compares with it once the data is prepared.

    Raises:
        ValueError: the data in OUTPUT was prepared from another file or with other settings.
    """
    given = {
        "TRAIN_TXT": str(train),
        "bytes of TRAIN_TXT": train.stat().st_size,
        "REPRODUCE_MIN_COUNT": int(settings["REPRODUCE_MIN_COUNT"]),
        "REPRODUCE_EPOCHS": int(settings["REPRODUCE_EPOCHS"]),
    }
    file = output / SETTINGS
    # Before there is data nothing depends on the settings, so that a mistake can be corrected in the same OUTPUT.
    if (output / "data" / "schema.json").exists():
        there = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        for name, value in given.items():
            if there.get(name) != value:
                raise ValueError(
                    f"{file} has {name} = {there.get(name, 'unknown')}, but {value} is given; "
                    "give the same value, or another OUTPUT"
                )
        return
    output.mkdir(parents=True, exist_ok=True)
    replace_file(file, (json.dumps(given, indent=2) + "\n").encode())


def main() -> None:
    train, output = (Path(each) for each in sys.argv[1:])
    try:
        check(os.environ)
        keep(train, output, os.environ)
    except (ValueError, OSError) as error:
        print(f"reproduce_paper.sh: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
