"""The log of a shadow: JSON lines of a bounded size, and what they say of both models once labels are known."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq
import torch

from cowrec.data_pipeline.rotated_file import append_line, read_lines
from cowrec.trainer.measures.quality import Quality, measure
from cowrec.trainer.measures.samples import Samples

MODELS = ("served", "shadow")


class ShadowLog:
    """Appends lines to a file; a full one is renamed to `FILE.1`, in place of the one before.

    Args:
        path: of the file.
        most_bytes: that both files may take.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, most_bytes: int) -> None:
        self._path, self._limit = path, most_bytes // 2
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            if file.tell():
                file.write(b"\n")  # ends a line that was left incomplete

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Appends lines. Raises OSError if the disk is full."""
        append_line(self._path, b"".join(orjson.dumps(each) + b"\n" for each in lines), self._limit)


def compare(log: Path, labels: Path, label: str) -> dict[str, Quality]:
    """Measures the predictions of both models, of samples whose label is known.

    Args:
        log: file of a shadow; the one before it is read too.
        labels: Parquet file, CSV file (`.csv`) or JSON lines (`.json`, `.jsonl`) with the columns `sample_id` and that
            of the label, 0 or 1.
        label: its column. Of several tasks, the predictions of the label of this name.

    Returns:
        The quality of each of MODELS. Of a sample that is in the log several times, the last predictions count.

    Raises:
        ValueError: a file or column is missing, or no sample of the log has a label.
        OSError: a file cannot be read.
    """
    known = _labels(labels, label)
    found: dict[str, tuple[float, float]] = {}
    for line in _lines(log):
        sample = str(line["sample_id"])
        if line["sample_id"] is not None and sample in known:
            one, other = (_of_label(line[each], label) for each in MODELS)
            found[sample] = one, other
    if not found:
        raise ValueError(
            f"no sample of {log} has a label in {labels}; send the sample_id of each sample with its request"
        )
    predictions = torch.tensor(np.array(list(found.values())), dtype=torch.float64).clamp(1e-12, 1 - 1e-12)
    outcome = torch.tensor([known[each] for each in found], dtype=torch.float32)
    return {name: measure(Samples(predictions[:, k].logit(), outcome)) for k, name in enumerate(MODELS)}


def _lines(log: Path) -> Iterator[dict[str, Any]]:
    if not log.exists():
        raise ValueError(f"{log} does not exist; cowrec serve --shadow-log writes it")
    for line in read_lines(log):
        with suppress(ValueError):  # a part of a line, left by a shadow that was killed
            yield json.loads(line)


def _of_label(prediction: float | dict[str, float], label: str) -> float:
    if isinstance(prediction, dict):
        if label not in prediction:
            raise ValueError(f"the models predict {', '.join(prediction)}, not {label!r}; give one of them as --label")
        return prediction[label]
    return prediction


def _labels(path: Path, label: str) -> dict[str, float]:
    try:
        if path.suffix == ".csv":
            table = pyarrow.csv.read_csv(path)
        elif path.suffix in (".json", ".jsonl"):
            table = pyarrow.json.read_json(path)
        else:
            table = pq.read_table(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} cannot be read as Parquet, .csv, .json or .jsonl: {error}") from error
    for name in ("sample_id", label):
        if name not in table.column_names:
            raise ValueError(f"{path} has no column {name!r}, but {', '.join(table.column_names)}")
    values = table[label].cast(pa.float64()).to_pylist()
    pairs = zip(table["sample_id"].to_pylist(), values, strict=True)
    return {str(sample): value for sample, value in pairs if value is not None}
