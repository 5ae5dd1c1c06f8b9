"""Inputs as a user names them (files, patterns, folders), and the files that they stand for."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from cowrec.data_pipeline.remote import is_remote, local_path

from .storage import find_files, path_of, stamp

HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class InputFile:
    """A raw file, and the values that the folders in its path give to columns.

    Attributes:
        path: the file.
        partition: (column, value) of each folder `column=value` in the path, as Hive names them; None is missing.
    """

    path: str
    partition: tuple[tuple[str, str | None], ...] = ()


def find_inputs(inputs: Sequence[str]) -> list[InputFile]:
    """Returns the files of all inputs, in their order.

    An input is a file; a folder, which stands for all files in it and in its folders, in the order of their paths,
    without those whose name starts with `.` or `_`; or a pattern with `*`, `?`, `[...]` or `**`, which stands for the
    files and folders that match, in the order of their paths. All of them may be URIs of an object store (s3://bucket/
    folder), in which `?` starts options instead.

    Raises:
        ValueError: a file does not exist, is empty, no regular file (a pipe cannot be read again) or given twice; a
            pattern matches nothing, or a folder has no file.
    """
    if not inputs:
        raise ValueError("no input file given")
    files = [file for each in inputs for file in find_files(each if is_remote(each) else str(local_path(each)))]
    seen: set[str] = set()
    for file in files:
        try:
            size, _ = stamp(file)
        except FileNotFoundError:
            raise ValueError(f"input file {file} does not exist") from None
        if size == 0:
            raise ValueError(f"input file {file} is empty; copy it again, or remove it")
        key = file if is_remote(file) else os.path.realpath(file)
        if key in seen:
            raise ValueError(f"input file {file} is given twice; its samples would count double")
        seen.add(key)
    return [InputFile(file, _partition(path_of(file))) for file in files]


def _partition(path: str) -> tuple[tuple[str, str | None], ...]:
    values: dict[str, str | None] = {}
    for part in Path(path).parts[:-1]:
        name, equals, value = part.partition("=")
        if equals and name:
            values[unquote(name)] = None if value == HIVE_NULL else unquote(value)
    return tuple(values.items())
