"""Groups of a split's samples, by the values of a column or by how often their ids occur in training; GAUC.

R samples, K pairs of a sample and its group, G groups.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from cowrec.data_pipeline import MISSING, OUT_OF_VOCABULARY, RESERVED_ROWS, Schema, SparseField
from cowrec.data_pipeline.dataset.schema import KEPT_PREFIX, TIME, vocabulary_file
from cowrec.data_pipeline.dataset.shards import read_columns
from cowrec.data_pipeline.reading.id_counts import log_id_counts
from cowrec.errors import UserError

from .quality import Samples, group_aucs, group_ranks, measure

THIRDS = ("rare", "middle", "frequent")
_MISSING_NAME, _UNKNOWN_NAME = "(missing)", "(rare or unknown)"


@dataclass(frozen=True)
class Segments:
    """Groups of the samples of a split by a column; a sample with several ids is in the group of each of them.

    Attributes:
        groups: group of each pair, in [0, G), int64 [K].
        samples: position of each pair's sample in the split, int64 [K].
        values: value of each group, [G].
        names: returns the names of values.
    """

    groups: np.ndarray
    samples: np.ndarray
    values: np.ndarray
    names: Callable[[np.ndarray], list[str]]

    @staticmethod
    def of(data_dir: Path, split: str, column: str) -> "Segments":
        """Groups a split by a sparse field or a kept column, which is read, 16 bytes a pair.

        Raises UserError if the data set has no such column, or a shard is missing or damaged.
        """
        schema = Schema.load(data_dir)
        if column in schema.kept:
            stored = read_columns(data_dir, schema, split, [KEPT_PREFIX + column])[KEPT_PREFIX + column]
            coded = stored.cast(pa.large_string()).combine_chunks().dictionary_encode()
            values = coded.dictionary.to_numpy(zero_copy_only=False)
            groups = np.array(coded.indices, np.int64)
            samples = np.arange(len(coded))
            return Segments(groups, samples, values, lambda chosen: [name or _MISSING_NAME for name in chosen.tolist()])
        field = _sparse_field(schema, column, data_dir)
        stored = read_columns(data_dir, schema, split, [column])[column].combine_chunks()
        if not pa.types.is_list(stored.type):
            values, groups = np.unique(stored.to_numpy(), return_inverse=True)
            samples = np.arange(len(stored))
        else:
            lengths = pc.list_value_length(stored).to_numpy()
            samples = np.arange(len(stored)).repeat(np.maximum(lengths, 1))
            ids = np.full(len(samples), MISSING, np.int64)  # of samples without ids
            ids[lengths[samples] > 0] = pc.list_flatten(stored).to_numpy()
            values, groups = np.unique(ids, return_inverse=True)
            samples, groups = np.divmod(np.unique(samples * len(values) + groups), len(values))  # each id once
        return Segments(groups, samples, values, lambda chosen: _id_names(data_dir, field, chosen))

    def measure(self, split: Samples, top: int) -> dict[str, Any]:
        """Measures the groups of a split's samples.

        Returns:
            * gauc: mean AUC of the groups that have both classes, weighted by their samples (Zhu et al. 2017, arXiv
              1703.02091; Zhou et al. 2018, arXiv 1706.06978); NaN without such a group;
            * ndcg, mrr: means of NDCG and of the reciprocal rank, without weights, over the same groups; the gain of
              a sample is its label;
            * groups, groups_in_gauc: numbers of all groups and of these;
            * share_in_gauc: share of the samples, by weight, in these groups;
            * largest: id and :class:`Quality` of each of the ``top`` groups with most weight, in descending order;
            * rest: :class:`Quality` of the samples in all other groups; None if there are none.
        """
        logits, label, weight = (column[self.samples] for column in split.arrays())
        known = ~np.isnan(label)
        groups, samples, weight, count = self.groups[known], self.samples[known], weight[known], len(self.values)
        of_groups = np.bincount(groups, weight, count)
        auc = group_aucs(logits[known], label[known], weight, groups, count)
        both = ~np.isnan(auc)
        ndcg, reciprocal = group_ranks(logits[known], label[known], groups, count)
        in_gauc = of_groups[both].sum()
        order = (-of_groups).argsort(kind="stable")
        order = order[of_groups[order] > 0]

        def measured(chosen: np.ndarray) -> dict[str, Any]:  # of a sample in several of the groups once
            return measure(split.where(torch.from_numpy(np.unique(samples[chosen])))).without_bins().values()

        names = self.names(self.values[order[:top]])
        largest = [
            {"id": name, **measured(groups == group)} for name, group in zip(names, order[:top].tolist(), strict=True)
        ]
        return {
            "gauc": float((auc * of_groups)[both].sum() / in_gauc) if in_gauc else nan,
            "ndcg": float(ndcg[both].mean()) if in_gauc else nan,
            "mrr": float(reciprocal[both].mean()) if in_gauc else nan,
            "groups": len(order),
            "groups_in_gauc": int(both.sum()),
            "share_in_gauc": float(in_gauc / of_groups.sum()) if len(order) else nan,
            "largest": largest,
            "rest": measured(~np.isin(groups, order[:top])) if len(order) > top else None,
        }


def id_count_thirds(data_dir: Path, split: str, train_rows: int | None = None) -> np.ndarray:
    """Divides a split by the mean over fields of log(1 + occurrences of the sample's id in training).

    Only the first ``train_rows`` training samples count, by default all. Samples with equal means are in one third.
    Returns the index into ``THIRDS`` of each sample in the stored order, int8 [R].
    """
    values = log_id_counts(data_dir, split, [field.name for field in Schema.load(data_dir).sparse], train_rows)
    first, second = (-(-len(values) * part // 3) - 1 for part in (1, 2))
    ordered = np.partition(values, (first, second))
    found: np.ndarray = (values > ordered[first]).astype(np.int8) + (values > ordered[second])
    return found


def tenths_by_time(data_dir: Path, split: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Divides a split into at most ten parts by time; samples of one time are in one part.

    Returns the part of each sample in the stored order, from 0, the oldest, int64 [R]; and the first time of each part,
    Unix seconds, int64. The result is None where the samples have no times.
    """
    schema = Schema.load(data_dir)
    if not schema.timed or not schema.split(split).rows:
        return None
    times = read_columns(data_dir, schema, split, [TIME])[TIME].to_numpy()
    newest_first = [len(times) - -(-len(times) * tenth // 10) for tenth in range(1, 11)]
    starts = np.unique(np.partition(times, newest_first)[newest_first])
    return np.searchsorted(starts, times, side="right") - 1, starts


def divided_by_time(data_dir: Path) -> bool:
    """Tells whether the test split of a data set has the newest samples."""
    return "split" in Schema.load(data_dir).settings


def _sparse_field(schema: Schema, column: str, data_dir: Path) -> SparseField:
    """Returns the sparse field of a name. Raises UserError for a name that samples cannot be grouped by."""
    fields = {field.name: field for field in schema.sparse}
    if column in fields:
        return fields[column]
    known = ", ".join([*fields, *(name for name in schema.kept if name not in fields)]) or "none"
    if column in (field.name for field in schema.dense):
        raise UserError(
            f"{column!r} of {data_dir} is a number, by which samples cannot be grouped; prepare it in"
            f" buckets, or choose one of: {known}"
        )
    raise UserError(f"{data_dir} has no field or kept column {column!r} to group by; there are: {known}")


def _id_names(data_dir: Path, field: SparseField, ids: np.ndarray) -> list[str]:
    """Returns the ids as the vocabulary has them; numbers where there is none."""
    names = {OUT_OF_VOCABULARY: _UNKNOWN_NAME, MISSING: _MISSING_NAME}
    if field.encoding == "vocabulary":
        values = pq.read_table(vocabulary_file(data_dir, field.vocabulary), columns=["value"])["value"]
        own = [row for row in ids.tolist() if row >= RESERVED_ROWS]
        rows = pa.array([row - RESERVED_ROWS for row in own], pa.int64())
        names |= dict(zip(own, values.take(rows).to_pylist(), strict=True))
    return [names.get(row, str(row)) for row in ids.tolist()]
