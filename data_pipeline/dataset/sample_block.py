"""A block of samples in memory, any selection of which becomes a `Batch`.

R samples, N dense fields, S single-valued sparse fields, B selected samples, V values of a list field.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from .schema import Schema

if TYPE_CHECKING:  # preparing data and their commands need no batch, and importing TorchRec takes seconds
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from .batch import Batch


@dataclass(frozen=True)
class Bags:
    """One list field: the values of sample r are `values[offsets[r] : offsets[r + 1]]`.

    Attributes:
        values: int32 [V]; int64 if the schema has raw ids.
        offsets: int64 [R + 1], starting at 0.
        weights: float32 [V], or None.
    """

    values: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None = None

    @property
    def lengths(self) -> torch.Tensor:
        """Number of values of each sample, int64 [R]."""
        return self.offsets[1:] - self.offsets[:-1]

    def take(self, index: torch.Tensor, total: int | None = None) -> "Bags":
        """Selects the bags of the samples `index` [B]; waits for the device unless `total`, their values, is known."""
        starts = self.offsets[index]
        lengths = self.offsets[index + 1] - starts
        offsets = _offsets(lengths)
        # Index of each selected value: its index in the output, shifted like its bag.
        source = torch.arange(int(offsets[-1]) if total is None else total, device=index.device)
        source += torch.repeat_interleave(starts - offsets[:-1], lengths, output_size=source.numel())
        weights = None if self.weights is None else self.weights[source]
        return Bags(self.values[source], offsets, weights)

    def by_position(self, most: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Divides the last L = `most` ids by position, the last one for the newest id. Waits for the device.

        Returns the ids of the first position, of the second, and so on; int32 [L * R], 1 where a sample has an id at a
        position; and the number of ids at each position.
        """
        position = torch.arange(most, device=self.offsets.device)[:, None]
        present = position >= most - self.lengths
        values = self.values[(position - most + self.offsets[1:])[present]]
        return values, present.int().flatten(), present.sum(1).tolist()

    @staticmethod
    def concat(parts: Sequence["Bags"], dtype: torch.dtype = torch.int32) -> "Bags":
        """Concatenates bags. Without parts, the values are empty and of type `dtype`."""
        if not parts:
            return Bags(torch.empty(0, dtype=dtype), torch.zeros(1, dtype=torch.int64))
        weights = [part.weights for part in parts if part.weights is not None]
        return Bags(
            torch.cat([part.values for part in parts]),
            _offsets(torch.cat([part.lengths for part in parts])),
            torch.cat(weights) if weights else None,
        )

    def to(self, device: torch.device | str) -> "Bags":
        weights = None if self.weights is None else self.weights.to(device)
        return Bags(self.values.to(device), self.offsets.to(device), weights)


@dataclass(frozen=True)
class SampleBlock:
    """R samples, stored sample by sample: a shuffled gather is four times as fast as from columns.

    Attributes:
        dense: float32 [R, N].
        label: float32 [R], or [R, T] for T > 1 labels.
        ids: int32 [R, S], single-valued fields in schema order; int64 if the schema has raw ids.
        bags: list fields by name.
        time, true_logit, weight: int64 (Unix seconds), float32 and float32 [R], or None.
    """

    dense: torch.Tensor
    label: torch.Tensor
    ids: torch.Tensor
    bags: dict[str, Bags]
    time: torch.Tensor | None = None
    true_logit: torch.Tensor | None = None
    weight: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.label.size(0)

    def take(self, index: torch.Tensor, totals: Sequence[int] | None = None) -> "SampleBlock":
        """Selects the samples `index`, int64 [B] on the same device.

        A block with list fields waits for the device unless `totals`, the numbers of their values by field, are known.
        """
        known: Sequence[int | None] = totals or [None] * len(self.bags)
        return SampleBlock(
            self.dense.index_select(0, index),
            self.label.index_select(0, index),
            self.ids.index_select(0, index),
            {name: bags.take(index, total) for (name, bags), total in zip(self.bags.items(), known, strict=True)},
            *(None if column is None else column.index_select(0, index) for column in self._optional),
        )

    def with_values_of(self, index: torch.Tensor, schema: Schema, fields: Collection[str]) -> "SampleBlock":
        """Gives all samples the values of the samples `index`, int64 [R], in the fields with these names."""
        dense, ids = self.dense.clone(), self.ids.clone()
        for columns, names in ((dense, [field.name for field in schema.dense]), (ids, schema.singles)):
            chosen = [number for number, name in enumerate(names) if name in fields]
            columns[:, chosen] = columns[:, chosen][index]
        bags = {name: own.take(index) if name in fields else own for name, own in self.bags.items()}
        return replace(self, dense=dense, ids=ids, bags=bags)

    @property
    def _optional(self) -> tuple[torch.Tensor | None, ...]:
        return self.time, self.true_logit, self.weight

    def take_each(self, order: torch.Tensor, slices: Sequence[slice]) -> Iterator["SampleBlock"]:
        """Yields the samples at each slice of `order`, int64 [R] on the same device.

        A block with list fields waits for the device once, before the first selection; others never do.
        """
        totals = self._totals(order, slices) if self.bags else [[]] * len(slices)
        for part, total in zip(slices, totals, strict=True):
            yield self.take(order[part], total)

    def _totals(self, order: torch.Tensor, slices: Sequence[slice]) -> list[list[int]]:
        """Returns the number of values of each list field in each slice of the order."""
        bounds = torch.tensor([[part.start for part in slices], [part.stop for part in slices]], device=order.device)
        ends = torch.stack([_offsets(bags.lengths[order])[bounds.long()] for bags in self.bags.values()], -1)
        totals: list[list[int]] = (ends[1] - ends[0]).tolist()
        return totals

    @staticmethod
    def concat(parts: Sequence["SampleBlock"]) -> "SampleBlock":
        """Concatenates at least one block."""
        if len(parts) == 1:
            return parts[0]
        optional = zip(*(part._optional for part in parts), strict=True)
        joined = [[column for column in columns if column is not None] for columns in optional]
        return SampleBlock(
            torch.cat([part.dense for part in parts]),
            torch.cat([part.label for part in parts]),
            torch.cat([part.ids for part in parts]),
            {name: Bags.concat([part.bags[name] for part in parts]) for name in parts[0].bags},
            *(torch.cat(columns) if columns else None for columns in joined),
        )

    @staticmethod
    def assemble(
        schema: Schema, total: int, parts: Iterable["SampleBlock"], device: torch.device | str
    ) -> "SampleBlock":
        """Assembles blocks of `total` samples on `device`; holds single-valued columns once, unlike `concat`."""
        dense = torch.empty((total, len(schema.dense)), dtype=torch.float32, device=device)
        tasks = (len(schema.labels),) if len(schema.labels) > 1 else ()
        label = torch.empty((total, *tasks), dtype=torch.float32, device=device)
        dtype = id_dtype(schema)
        ids = torch.empty((total, len(schema.singles)), dtype=dtype, device=device)
        given = (schema.timed, schema.true_logits, schema.sample_weights)
        optional = [
            torch.empty(total, dtype=kind, device=device) if has else None
            for has, kind in zip(given, (torch.int64, torch.float32, torch.float32), strict=True)
        ]
        bags: dict[str, list[Bags]] = {name: [] for name in schema.lists}
        stop = 0
        for block in parts:
            start, stop = stop, stop + len(block)
            dense[start:stop] = block.dense
            label[start:stop] = block.label
            ids[start:stop] = block.ids
            for column, part in zip(optional, block._optional, strict=True):
                if column is not None and part is not None:
                    column[start:stop] = part
            for name, field_bags in bags.items():
                field_bags.append(block.bags[name].to(device))
        joined = {name: Bags.concat(own, dtype) for name, own in bags.items()}
        return SampleBlock(dense, label, ids, joined, *optional)

    def batch(self, schema: Schema, global_batch_size: int) -> "Batch":
        """Converts all samples to a batch with the number of ids of each key, which TorchRec need not read then."""
        from .batch import Batch

        sparse = self._jagged(schema) if self.bags else self._one_id_each(schema)
        return Batch(self.dense, sparse, self.label, global_batch_size, *self._optional)

    def _one_id_each(self, schema: Schema) -> "KeyedJaggedTensor":
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        lengths, offsets = _unit_bags(self.ids.numel(), self.ids.device)
        keys = [field.name for field in schema.sparse]
        values = self.ids.t().contiguous().view(-1)
        count = [len(self)] * len(keys)
        return KeyedJaggedTensor(keys, values, lengths=lengths, offsets=offsets, stride=len(self), length_per_key=count)

    def _jagged(self, schema: Schema) -> "KeyedJaggedTensor":
        """Builds the tensor of a schema with list fields.

        With weights, single-valued fields have weight 1 and mean-pooled lists 1 / length, because TorchRec's weighted
        collections cannot average.
        """
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        single = iter(self.ids.t())
        one_each, _ = _unit_bags(len(self), self.ids.device)
        values, lengths, weights, counts = [], [], [], list[int]()
        for field in schema.sparse:
            weight, bags = None, self.bags.get(field.name)
            if bags is None:
                value, length, of_keys = next(single), one_each, [len(self)]
            elif field.is_sequence:
                value, length, of_keys = bags.by_position(field.max_length)
            else:
                value, length, weight, of_keys = bags.values, bags.lengths.int(), bags.weights, [bags.values.numel()]
            if weight is None and schema.is_weighted:
                weight = torch.ones(value.numel(), device=value.device)
                if field.pooling == "mean":
                    inverse = length.clamp(min=1).float().reciprocal()
                    weight = torch.repeat_interleave(inverse, length, output_size=value.numel())
            values.append(value)
            lengths.append(length)
            weights.append(weight)
            counts += of_keys
        return KeyedJaggedTensor(
            list(schema.keys),
            torch.cat(values),
            weights=torch.cat([weight for weight in weights if weight is not None]) if schema.is_weighted else None,
            lengths=torch.cat(lengths),
            stride=len(self),
            length_per_key=counts,
        )


def id_dtype(schema: Schema) -> torch.dtype:
    return torch.int64 if schema.has_raw_ids else torch.int32


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    """Returns 0 and the cumulative sum of lengths: int64 [len(lengths) + 1]."""
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


@lru_cache(maxsize=8)
def _unit_bags(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns lengths and offsets of `count` bags of one value each, which batches of a size share."""
    ones = torch.ones(count, dtype=torch.int32, device=device)
    return ones, torch.arange(count + 1, dtype=torch.int32, device=device)
