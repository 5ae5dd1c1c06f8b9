"""The folder that `prepare` writes: on this machine, or in an object store."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cowrec.data_pipeline.dataset.schema import SCHEMA_FILE
from cowrec.data_pipeline.dataset.writer import disk_errors, new_folder
from cowrec.data_pipeline.remote import Place, RemoteFolder, is_remote, local_path


@contextmanager
def output_folder(output: Place, *, overwrite: bool, shared: bool) -> Iterator[Path]:
    """Creates a local folder that becomes `output` at the end of the block, or is removed on an exception.

    For an object store it is a temporary folder (in $TMPDIR), which is uploaded with `schema.json` last, so that an
    interrupted upload leaves no data set.

    Args:
        output: a path or a URI, of a new or empty folder.
        overwrite: replace an existing data set.
        shared: other machines write to the folder, too.

    Raises:
        ValueError: `output` exists and is not empty (with `overwrite`: and is no data set), is being written by another
            process, or is in an object store though `shared`. OSError: the disk is full, or the store does not answer.
    """
    if not is_remote(output):
        with new_folder(local_path(output), overwrite=overwrite) as folder:
            yield folder
        return
    uri = os.fspath(output)
    if shared:
        raise ValueError(f"output {uri}: the workers of a cluster need a folder that they share; copy it later")
    remote = RemoteFolder(uri)
    existing = remote.list()
    if existing and not overwrite:
        raise ValueError(f"{uri} exists and is not empty; choose another folder or remove it (prepare: --overwrite)")
    if existing and SCHEMA_FILE not in existing:
        raise ValueError(f"{uri} is not a prepared data set, so it is not overwritten; choose another output folder")
    with tempfile.TemporaryDirectory(prefix="cowrec-prepare-") as parent:
        folder = Path(parent) / "data"
        folder.mkdir()
        with disk_errors(folder):
            yield folder
        names = [str(each.relative_to(folder)) for each in sorted(folder.rglob("*")) if each.is_file()]
        remote.remove(sorted(existing, key=lambda name: name != SCHEMA_FILE))
        remote.upload(folder, sorted(names, key=lambda name: name == SCHEMA_FILE))
