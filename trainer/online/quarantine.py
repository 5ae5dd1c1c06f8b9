"""Quarantine of an online run: the samples of batches that would have made the model non-finite, as Parquet files."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from cowrec.data_pipeline import StreamBatch

FOLDER = "quarantine"
"""Folder in a run."""


def quarantine(run_dir: Path, batch: StreamBatch, logits: Tensor, reason: str) -> Path:
    """Writes the samples of a batch to ``run_dir/quarantine/batch_N.parquet``.

    A resumed run writes the same file again. The columns are those of a data set, as the model reads them, ``time``,
    ``sample_id``, ``logit`` and ``reason``.

    Args:
        run_dir: folder of the run.
        batch: the batch; N is its number in the stream.
        logits: what the model predicted, [B].
        reason: why the batch is set aside.

    Raises:
        OSError: the file cannot be written.
    """
    columns = {name.removeprefix("#"): batch.table[name] for name in batch.table.column_names}
    columns["logit"] = pa.chunked_array([pa.array(logits.double().cpu().numpy())])
    columns["reason"] = pa.chunked_array([pa.repeat(pa.scalar(reason), len(batch.table))])
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"batch_{batch.end.counters['batches']:09d}.parquet"
    partial = path.with_suffix(".partial")
    pq.write_table(pa.table(columns), partial)
    partial.rename(path)
    return path
