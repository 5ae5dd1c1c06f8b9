"""Adam's state on the tables of a collection, in the form of TorchRec's KeyedOptimizer."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from cowrec.sparse_opt.tbe.lookup import sharded_like_weights

from .collection_adam import CollectionAdam

LAST_STEP, LRS, STEP = "last_step", "lrs", "step"


class Entry:
    """Entry of a state that is computed when the state is taken, and acts when the state is loaded.

    KeyedOptimizer calls both functions, also where it is part of another one.
    """

    def __init__(self, take: Callable[[], Any], load: Callable[[Any], None]):
        self.state_dict, self.load_state_dict = take, load


class CollectionState:
    """State of a collection's tables. All ranks must make, take and load it together.

    Args:
        path: the collection's path in the model, without the names of wrappers.
        adam: Adam on the collection.

    Attributes:
        params: weights by path, sharded as in the model's ``state_dict()``.
        of_param: ``exp_avg`` and ``exp_avg_sq`` of each weight, sharded like it, and ``step``. Where rows are replayed,
            within :meth:`as_stored`, ``last_step`` in place of ``step``, and the last weight's ``lrs``.
    """

    def __init__(self, path: str, adam: CollectionAdam):
        self._adam, self._steps = adam, 0
        lookups = adam.lookups
        with adam.as_stored():
            kinds = {
                name: self._sharded([getattr(each, name) for each in lookups]) for name in ("exp_avg", "exp_avg_sq")
            }
            last_steps = [each.replay.last_step for each in lookups if each.replay]
            self._last_steps = self._sharded(last_steps, per_row=True) if adam.history.is_replayed else {}
            weights = {
                key: weight for key, weight in adam.collection.state_dict().items() if _table(key) in kinds["exp_avg"]
            }
        prefix = f"{path}." if path else ""
        self.params: dict[str, Tensor] = {f"{prefix}{key}": weight for key, weight in weights.items()}
        self.of_param: dict[Tensor, dict[str, Any]] = {
            weight: {name: tensors[_table(key)] for name, tensors in kinds.items()} for key, weight in weights.items()
        }
        self._tables = [_table(key) for key in weights]
        self._set_entries(stored=False)

    @contextmanager
    def as_stored(self) -> Iterator[None]:
        """Makes it hold rows as they are in memory, some of them behind; has no effect unless rows are replayed."""
        self._set_entries(stored=bool(self._last_steps))
        try:
            yield
        finally:
            self._set_entries(stored=False)

    def require_entries(self, given: Mapping[str, Mapping[str, Any]]) -> None:
        """Raises ValueError if the ``state`` of a state_dict lacks an entry."""
        for key, weight in self.params.items():
            entries = given.get(key, {})
            missing = sorted(self.of_param[weight].keys() - entries.keys())
            if not missing:
                continue
            remedy = "it is of another model"
            if LAST_STEP in entries:
                remedy = 'its rows may be behind: load it and the weights within as_stored(), under "replay"'
            elif LAST_STEP in missing and entries:
                remedy = "it was taken outside of as_stored(): load it and the weights there"
            raise ValueError(f"the optimizer's state has no {missing[0]!r} of {key!r}; {remedy}")

    def _set_entries(self, stored: bool) -> None:
        last = len(self._tables) - 1
        for number, (table, own) in enumerate(zip(self._tables, self.of_param.values(), strict=True)):
            for name in (STEP, LAST_STEP, LRS):
                own.pop(name, None)
            if stored:
                own[LAST_STEP] = self._last_steps[table]
            else:
                own[STEP] = Entry(
                    self._take_steps if number == 0 else self._steps_taken,
                    self._load_steps if number == last else _ignore,
                )
        if stored:  # loaded after the last steps of all tables
            own[LRS] = Entry(self._adam.stored_rates, self._load_rates)

    def _take_steps(self) -> Tensor:
        self._steps = self._adam.settle()
        return self._steps_taken()

    def _steps_taken(self) -> Tensor:
        return torch.tensor(self._steps)

    def _load_steps(self, steps: Tensor) -> None:
        self._adam.restore(int(steps))

    def _load_rates(self, rates: Any) -> None:
        self._adam.restore_stored(rates)

    def _sharded(self, flats: list[Tensor], *, per_row: bool = False) -> dict[str, Any]:
        dtype = torch.int32 if per_row else torch.float32
        lookups = [each.lookup for each in self._adam.lookups]
        return sharded_like_weights(self._adam.collection, lookups, flats, dtype, per_row=per_row)


def _table(key: str) -> str:
    return key.removesuffix(".weight")


def _ignore(_: Any) -> None: ...
