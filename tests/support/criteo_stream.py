"""A plain loop over the stream of Criteo-like ids, the oracle of tests of the stream and of the bench."""

from cowrec.data_pipeline.synthetic.criteo_ids import CriteoIds


def last_by_loop(ids: CriteoIds, samples: int) -> list[list[int]]:
    """Number (from 1) of each row's last sample in each table, or 0."""
    last = [[0] * size for size in ids.table_rows.tolist()]
    for field, rows in enumerate(ids.rows(0, samples).tolist()):
        for sample, row in enumerate(rows, 1):
            last[field][row] = sample
    return last
