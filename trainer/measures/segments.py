"""Quality by segment: samples grouped by the values of a column of the data set, and GAUC over the groups.

R samples, K pairs of a sample and its group, G groups.
"""

import dataclasses
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
from torch import Tensor

from cowrec.data_pipeline import MISSING, OUT_OF_VOCABULARY, RESERVED_ROWS, Schema, SparseField
from cowrec.data_pipeline.dataset.schema import KEPT_PREFIX
from cowrec.data_pipeline.dataset.shards import read_columns

from .auc import ascending, aucs
from .quality import measure
from .samples import Samples

_MISSING_NAME, _UNKNOWN_NAME = "(missing)", "(rare or unknown)"


@dataclass(frozen=True)
class Segments:
    """Groups of the samples of a split by a column; a sample with several ids is in the group of each of them.

    Attributes:
        groups: of each pair, in [0, G), int64 [K].
        samples: position of each pair's sample in the split, int64 [K].
        values: of the groups, [G].
        names: returns the names of values.
    """

    groups: Tensor
    samples: Tensor
    values: np.ndarray
    names: Callable[[np.ndarray], list[str]]

    @staticmethod
    def of(data_dir: Path, split: str, column: str) -> "Segments":
        """Groups a split by a sparse field or a kept column; reads that column, 16 bytes a pair.

        Raises:
            ValueError: the data set has no such column, or a shard is missing or damaged.
        """
        schema = Schema.load(data_dir)
        if column in schema.kept:
            stored = read_columns(data_dir, schema, split, [KEPT_PREFIX + column])[KEPT_PREFIX + column]
            coded = stored.cast(pa.large_string()).combine_chunks().dictionary_encode()
            values = coded.dictionary.to_numpy(zero_copy_only=False)
            return Segments(_tensor(coded.indices), torch.arange(len(coded)), values, _kept_names)
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
        return Segments(_tensor(groups), _tensor(samples), values, lambda chosen: _id_names(data_dir, field, chosen))

    def measure(self, split: Samples, top: int) -> dict[str, Any]:
        """Measures the groups of a split's samples.

        Returns:
            * gauc: mean AUC of the groups that have both classes, weighted by their samples (Zhu et al. 2017, arXiv
              1703.02091; Zhou et al. 2018, arXiv 1706.06978); NaN without such a group;
            * groups, groups_in_gauc: their numbers;
            * share_in_gauc: share of the samples, by weight, in these groups;
            * largest: id and :class:`Quality` of each of the ``top`` groups with most weight, in descending order;
            * rest: :class:`Quality` of the samples in all other groups; None if there are none.
        """
        groups, samples = (each.to(split.label.device) for each in (self.groups, self.samples))
        order = ascending(split.logits[samples])
        order = order[~split.label[samples[order]].isnan()]
        groups, pairs = groups[order], split.where(samples[order])
        weight, count = pairs.weights(), len(self.values)
        of_groups = torch.zeros(count, dtype=torch.float64, device=weight.device).index_add_(0, groups, weight)
        auc = aucs(pairs.logits, pairs.label, weight, groups, count)
        both = ~auc.isnan()
        in_gauc = of_groups[both].sum()
        order = of_groups.argsort(descending=True, stable=True)
        order = order[of_groups[order] > 0]
        ids = self.names(self.values[order[:top].cpu().numpy()])
        largest = [
            {"id": name, **_values(pairs.where(groups == group))}
            for name, group in zip(ids, order[:top].tolist(), strict=True)
        ]
        others = torch.ones(count, dtype=torch.bool, device=weight.device)
        others[order[:top]] = False
        return {
            "gauc": ((auc * of_groups)[both].sum() / in_gauc).item() if in_gauc else nan,
            "groups": len(order),
            "groups_in_gauc": int(both.sum()),
            "share_in_gauc": (in_gauc / of_groups.sum()).item() if len(order) else nan,
            "largest": largest,
            "rest": _values(pairs.where(others[groups])) if len(order) > top else None,
        }


def _values(samples: Samples) -> dict[str, Any]:
    return dataclasses.replace(measure(samples), calibration_bins=None).values()


def _tensor(numbers: np.ndarray | pa.Array) -> Tensor:
    return torch.from_numpy(np.array(numbers, np.int64))


def _sparse_field(schema: Schema, column: str, data_dir: Path) -> SparseField:
    """The sparse field of a name. Raises ValueError for a name that samples cannot be grouped by."""
    for field in schema.sparse:
        if field.name == column:
            return field
    known = ", ".join(dict.fromkeys([*(each.name for each in schema.sparse), *schema.kept])) or "none"
    if column in (each.name for each in schema.dense):
        raise ValueError(
            f"{column!r} of {data_dir} is a number, by which samples cannot be grouped; prepare it in"
            f" buckets, or choose one of: {known}"
        )
    raise ValueError(f"{data_dir} has no field or kept column {column!r} to group by; there are: {known}")


def _kept_names(values: np.ndarray) -> list[str]:
    return [value or _MISSING_NAME for value in values.tolist()]


def _id_names(data_dir: Path, field: SparseField, ids: np.ndarray) -> list[str]:
    """The ids as the vocabulary has them; numbers where there is none."""
    names = {OUT_OF_VOCABULARY: _UNKNOWN_NAME, MISSING: _MISSING_NAME}
    if field.encoding == "vocabulary":
        values = pq.read_table(data_dir / "vocabulary" / f"{field.name}.parquet", columns=["value"])["value"]
        own = [each for each in ids.tolist() if each >= RESERVED_ROWS]
        rows = pa.array([each - RESERVED_ROWS for each in own], pa.int64())
        names |= dict(zip(own, values.take(rows).to_pylist(), strict=True))
    return [names.get(each, str(each)) for each in ids.tolist()]
