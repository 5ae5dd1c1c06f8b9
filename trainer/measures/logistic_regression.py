"""One-hot logistic regression: what a model without embeddings reaches on the same samples.

B samples, F fields, V ids in them, P distinct ids, N numbers.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.data_pipeline import Batch, Reader, Schema

from .quality import Quality
from .samples import Samples
from .tasks import Tasks

L2, STEPS = 10.0, 50


class LogisticRegression:
    """A weight for each id of a field, for each number, and a bias; of several labels, for each by itself.

    Minimizes ``sum of u * loss + L2 / 2 * ||w||^2`` over the training samples, with sample weights u of mean 1, the
    cross-entropy as loss and no penalty of the bias: scikit-learn's `LogisticRegression(C=0.1)` on the one-hot matrix.
    Bags are pooled as the schema says, and numbers standardized. Whatever their encoding, ids are those of the training
    samples; an id of another split that is not among them has the weight 0.

    L-BFGS (`torch.optim.LBFGS`), with each weight in units of its standard deviation under the data, ends where a step
    lowers the sum by less than 1e-3, mostly after 20 steps.

    Args:
        schema: of the data.
        batch: all training samples in one batch, on the CPU.
    """

    def __init__(self, schema: Schema, batch: Batch) -> None:
        self._fields = schema.sparse
        jagged = batch.sparse.to_dict()
        self._ids = [jagged[field.name].values().unique() for field in self._fields]
        self._mean = batch.dense.mean(0)
        deviation = (batch.dense - self._mean).square().mean(0).sqrt()
        self._deviation = torch.where(deviation > 0, deviation, 1)
        self._weights: list[Tensor] = []
        matrix, numbers, samples = self._one_hot(batch.sparse), self._numbers(batch), len(batch.dense)
        transposed = matrix.transposed(samples, sum(map(len, self._ids)))
        weight = torch.ones(samples) if batch.weight is None else batch.weight / batch.weight.mean()
        for label in batch.label.view(samples, -1).unbind(1):
            self._weights.append(_fitted(matrix, transposed, numbers, label, weight))

    def logits(self, batch: Batch) -> Tensor:
        """Logits [B], or [B, T] of T > 1 labels."""
        matrix, numbers = self._one_hot(batch.sparse), self._numbers(batch)
        logits = [_logits(matrix, numbers, weights) for weights in self._weights]
        return torch.stack(logits, 1) if len(logits) > 1 else logits[0]

    def quality(self, reader: Reader, tasks: Tasks) -> Quality:
        """Measures all samples of a reader of one process, not shuffled."""
        # If the training split kept a share of the negatives, predictions of other splits are corrected for it.
        shift = 0.0 if reader.split == "train" else reader.schema.logit_shift
        parts = [(self.logits(batch) + shift, batch.label, batch.weight) for batch in reader.epoch(0)]
        logits, label, weight = ([each for each in column if each is not None] for column in zip(*parts, strict=True))
        return tasks.measure(Samples(torch.cat(logits), torch.cat(label), torch.cat(weight) if weight else None))

    def _numbers(self, batch: Batch) -> Tensor:
        """Standardized numbers, 0 where one is not finite, and a 1 for the bias, [B, N + 1]."""
        standardized = (batch.dense - self._mean) / self._deviation
        return F.pad(standardized.nan_to_num(0.0, 0.0, 0.0), (0, 1), value=1.0)

    def _one_hot(self, sparse: KeyedJaggedTensor) -> "_Bags":
        """The ids as columns of one matrix, field by field: F * B bags."""
        jagged, columns, values, first = sparse.to_dict(), [], [], 0
        for field, known in zip(self._fields, self._ids, strict=True):
            own = jagged[field.name]
            ids, weights, lengths = own.values(), own.weights_or_none(), own.lengths().long()
            place = torch.searchsorted(known, ids).clamp_max(len(known) - 1) if len(known) else torch.zeros_like(ids)
            value = (known[place] == ids).float() if len(known) else torch.zeros(len(ids))
            if weights is not None:  # those of means included
                value = value * weights
            elif field.pooling == "mean":
                value = value / lengths.repeat_interleave(lengths)
            columns.append(place.long() + first)
            values.append(value)
            first += len(known)
        return _Bags(torch.cat(columns), sparse.offsets()[:-1].long(), torch.cat(values))


class _Bags(NamedTuple):
    """A sparse matrix by its entries, row by row.

    Attributes:
        columns: of the entries, int64 [V].
        starts: first entry of each row, int64.
        values: of the entries, float32 [V].
    """

    columns: Tensor
    starts: Tensor
    values: Tensor

    def times(self, vector: Tensor) -> Tensor:
        """Product with a vector that has an element for each column; an element for each row."""
        table = vector[:, None]
        return F.embedding_bag(self.columns, table, self.starts, mode="sum", per_sample_weights=self.values).squeeze(1)

    def transposed(self, samples: int, columns: int) -> "_Bags":
        """A row for each column; its columns are samples, which repeat over the fields of the rows."""
        lengths = torch.diff(self.starts, append=torch.tensor([len(self.columns)]))
        of_sample = torch.arange(len(lengths)).remainder_(samples).repeat_interleave(lengths)
        order = self.columns.argsort()
        starts = F.pad(self.columns.bincount(minlength=columns).cumsum(0), (1, 0))[:-1]
        return _Bags(of_sample[order], starts, self.values[order])


def _logits(matrix: _Bags, numbers: Tensor, weights: Tensor) -> Tensor:
    """Logits [B] of weights [P + N + 1]."""
    ids, dense = weights.split([len(weights) - numbers.shape[1], numbers.shape[1]])
    return matrix.times(ids).view(-1, len(numbers)).sum(0) + numbers @ dense


def _fitted(matrix: _Bags, transposed: _Bags, numbers: Tensor, label: Tensor, weight: Tensor) -> Tensor:
    """The best weights, [P + N + 1], for labels and sample weights [B]; NaN is an unknown label."""
    weight, label = torch.where(label.isnan(), 0, weight), label.nan_to_num()
    rate = (weight @ label / weight.sum()).nan_to_num(0.5).clamp(1e-3, 1 - 1e-3)
    squares = transposed._replace(values=transposed.values.square()).times(weight)
    unit = (rate * (1 - rate) * torch.cat([squares, weight @ numbers.square()]) + L2).rsqrt()
    penalty = torch.full_like(unit, L2)
    penalty[-1] = 0
    scaled = torch.zeros_like(unit)
    scaled[-1] = rate.logit() / unit[-1]
    search = torch.optim.LBFGS([scaled], max_iter=STEPS, tolerance_change=1e-3, line_search_fn="strong_wolfe")

    def objective() -> float:
        weights = scaled * unit
        logits = _logits(matrix, numbers, weights)
        losses = weight * F.binary_cross_entropy_with_logits(logits, label, reduction="none")
        error = weight * (logits.sigmoid() - label)
        scaled.grad = (torch.cat([transposed.times(error), error @ numbers]) + penalty * weights) * unit
        return losses.double().sum().item() + (penalty * weights.square()).double().sum().item() / 2

    search.step(objective)
    return scaled * unit
