"""The running mean of a model's weights, which is measured and kept in place of the last weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..runs.checkpoint import State, copied
from ..sharded_model.build import local_shards

STATES = 8
"""Number of states of each epoch that enter the mean."""
LATER = 4.0
"""Power of a state's number in its weight in the mean."""
_PART = 1 << 24
"""Numbers in a part, which bounds the memory for copies."""


class WeightAverage:
    """Weighted mean of the states of a model. The weight of the i-th state grows as i to the power of LATER.

    After k states the mean is ``m + (p + 1) / (k + p) * (w - m)``, where w is the k-th state, m the mean before, and p
    is LATER. This is the polynomial-decay averaging of Shamir and Zhang (arXiv 1212.1824, section 4). Under constant
    learning rates the weights keep moving around a good place, and their mean is nearer to the place than each state.
    The mean needs no number of epochs in advance, as a decay of learning rates does.

    The mean takes the memory of the weights once more, but none of moments. Each state costs a pass over all tables, in
    which replayed rows take the steps that they missed.

    Attributes:
        count: number of states in the mean.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.count = 0
        self._mean: State = {}

    def add(self) -> None:
        """Adds the present state of the model. All processes call together."""
        self.count += 1
        if self.count == 1:
            self._mean = copied(averaged_weights(self._model))
            return
        share = (LATER + 1) / (self.count + LATER)
        for mean, weight in self._parts():
            # A mask of -inf stays what it is, but its difference from itself is no number.
            mean.copy_(torch.where(mean == weight, mean, mean.lerp(weight, share)))

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Gives the model the mean as its weights within the block, in which no step is taken."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def state(self) -> State:
        """Returns what a checkpoint has of the mean, sharing its memory; nothing before the first state."""
        return {"average": self._mean, "averaged": torch.tensor(self.count)} if self.count else {}

    def empty_state(self) -> State:
        """Returns a state to read a checkpoint into, which :meth:`load` takes."""
        return {"average": copied(averaged_weights(self._model)), "averaged": torch.tensor(0)}

    def load(self, state: State) -> None:
        self._mean, self.count = state["average"], int(state["averaged"])

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields parts of the means on this process, and the same parts of the weights."""
        weights = averaged_weights(self._model)
        for name, mean in self._mean.items():
            for (own, _), (weight, _) in zip(local_shards(mean), local_shards(weights[name]), strict=True):
                yield from zip(own.view(-1).split(_PART), weight.view(-1).split(_PART), strict=True)

    def _exchange(self) -> None:
        for mean, weight in self._parts():
            before = weight.clone()
            weight.copy_(mean)
            mean.copy_(before)


def averaged_weights(model: nn.Module) -> State:
    """Returns the floating-point weights of a model, sharing their memory, with replayed rows up to date."""
    return {name: tensor for name, tensor in model.state_dict().items() if tensor.dtype.is_floating_point}
