"""The folder of a group of runs that share a configuration: what they share, and one JSON line for each run."""

import hashlib
import json
from pathlib import Path
from typing import Any

from cowrec.data_pipeline.files import replace_file
from cowrec.trainer.config.run import RunConfig, first_difference, load_config, save_config, to_plain
from cowrec.trainer.runs.run_dir import CONFIG, to_json


def require_own(folder: Path, what: str) -> None:
    """Raises ValueError if a folder has files, but no configuration of a sweep or study."""
    if not (folder / CONFIG).exists() and any(each.suffix != ".partial" for each in folder.iterdir()):
        raise ValueError(f"{folder} is not empty and not the folder of a {what}; choose another --output")


def keep_config(config: RunConfig, file: Path) -> str:
    """Writes the configuration that all runs share, or checks an existing file against it. Returns its SHA-256."""
    if not file.exists():
        save_config(config, file)
    # Loaded, so that a file from before a key was added has its default.
    elif difference := first_difference(to_plain(load_config(file)), to_plain(config)):
        raise ValueError(f"{file} has another configuration: {difference}; choose another --output")
    return hashlib.sha256(file.read_bytes()).hexdigest()


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Lines of a file of JSON lines; none if it does not exist."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    """Replaces the file at once, so that it never holds half a line."""
    replace_file(file, "".join(to_json(line) + "\n" for line in lines).encode())
