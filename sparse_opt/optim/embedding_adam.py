"""Adam for sharded embedding tables, with CowClip and coupled L2, on any device.

A replaced backward updates the tables, so that their fused optimizer, plain SGD without state, never runs. FBGEMM's own
Adam exists on CUDA alone, updates the rows of the batch alone, and has no coupled L2.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import inf
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler

from cowrec.errors import UserError

from ..algorithm.adam import AdamConfig
from ..algorithm.clip import ClipRule, NoClip
from ..lookups.backward import LossScale
from ..lookups.handle import LookupsHandle, require_unattached
from ..lookups.requirements import lookups_under_rules
from ..lookups.rules import table_rules
from ..tbe.collection import is_pruned
from ..tbe.inventory import ModelInventory
from .collection_adam import CollectionAdam, UpdatedInBackward
from .lookup_adam import LookupAdam
from .replay import require_replayable


class EmbeddingAdam(LookupsHandle, UpdatedInBackward):
    """Adam over all sharded tables of a model, with a clip rule; ``config.absent_rows`` sets which rows a step updates.

    The tables must be sharded under plain fused SGD (``EmbOptimType.EXACT_SGD``), whose update this class replaces. It
    trains data-parallel tables too; ``torchrec.optim.optimizers.in_backward_optimizer_filter`` leaves these out of the
    dense optimizer.

    ``EmbeddingAdam`` is a KeyedOptimizer and replaces the model's ``fused_optimizer``, which has the same state and
    ``param_groups``. :meth:`step` and :meth:`zero_grad` do nothing, because the backward pass updates the tables at the
    learning rate in ``param_groups``. Schedulers and TorchRec's wrappers set that rate.

    A table's state, by the path of its weight, is ``exp_avg`` and ``exp_avg_sq``, float32, sharded like the weight, and
    ``step``, int64 []. The tensors share the optimizer's memory. Taking the state brings all rows up to date. All ranks
    must take and load the state together, before or after the model's state. ``exp_avg_sq`` of weights under FTRL is
    the sum of squared gradients, and their ``exp_avg`` is 0.

    A collection takes a step in each of its backward passes; collections may take different numbers of steps. If an
    exception interrupts a backward pass, some tables have not taken its step. They take that step at the next forward
    pass, without the gradients of the batch and with a warning.

    Under ``absent_rows = "replay"``, a row catches up when a forward pass looks it up, and all rows catch up when the
    model's ``state_dict()`` is taken. Neither changes the results of training. Call :meth:`flush` before you read or
    write the tables' memory in other ways. A forward pass raises RuntimeError if rows were written while they were
    behind. Weights that ``load_state_dict`` of the model loads count as weights after the latest step.

    Args:
        model, rule, exclude: as in :func:`attach_cowclip`; no rule by default. Excluded tables are trained.
        clip_columns: number of leading columns that are measured and clipped, for all tables or by name.
        lr_factors: factors of the rate in ``param_groups``, hence of weight decay too, and of FTRL's alpha, by table.
        grad_scaler: as in :func:`attach_cowclip`; a gradient of zeros takes a step too.

    ``collections`` has Adam on the lookups of each sharded collection.

    Raises ValueError: as :func:`attach_cowclip`; or a table has another fused optimizer or cannot be replayed, the rule
    bounds more than a row under "replay", FTRL has no columns, or a scheduler drives the fused optimizers already.
    """

    def __init__(
        self,
        model: nn.Module,
        config: AdamConfig,
        rule: ClipRule | Mapping[str, ClipRule] | None = None,
        *,
        exclude: Sequence[str] = (),
        clip_columns: int | Mapping[str, int] | None = None,
        lr_factors: Mapping[str, float] | None = None,
        grad_scaler: GradScaler | None = None,
    ):
        if config.wide and clip_columns is None:
            raise UserError(
                "AdamConfig.wide is FTRL for the columns after clip_columns, but clip_columns is None; give the number"
                " of leading columns that stay under Adam"
            )
        inventory, loss_scale = ModelInventory(model), LossScale(grad_scaler)
        self.config, given = config, dict(lr_factors or {})
        rules = table_rules(inventory, NoClip() if rule is None else rule, exclude)
        factors = {table: float(given[name]) for table, name in inventory.named("lr_factors", given).items()}
        _require_rates(factors, config)
        if config.absent_rows == "replay":
            require_replayable(rules, config, [name for name, table in inventory.tables.items() if table.column_ranks])
        wrapped = lookups_under_rules(inventory, rules, clip_columns, is_scaled=loss_scale.is_used)
        require_unattached(inventory)
        for module in filter(is_pruned, inventory.called.values()):
            raise UserError(
                f"{type(module).__name__} (ITEP) gives rows to other ids, whose moments EmbeddingAdam would keep; use"
                " attach_cowclip under a fused optimizer, or TorchRec's managed collision"
            )
        with inventory.raised_on_all_ranks():
            for lookup in (own.lookup for own in wrapped if not own.lookup.is_plain_sgd):
                raise UserError(
                    f"table {lookup.shards[0].name!r} is under fused {lookup.module.optimizer.name}, whose update"
                    " EmbeddingAdam would bypass; shard it under EmbOptimType.EXACT_SGD"
                )
            self.collections = []
            for collection in inventory.collections.values():
                own_lookups = [own for own in wrapped if own.lookup.collection is collection]
                tables = inventory.tables_of(collection)
                self.collections.append(CollectionAdam(collection, tables, own_lookups, config, factors))
                self.collections[-1].require_undriven()
        for path, adams in zip(inventory.collections, self.collections, strict=True):
            adams.make_state(path)
        params = {key: weight for adams in self.collections for key, weight in adams.params.items()}
        state = {weight: entries for adams in self.collections for weight, entries in adams.of_param.items()}
        restore = [adams.replace_fused(config.lr) for adams in self.collections]
        groups = [group for adams in self.collections for group in adams.groups]
        UpdatedInBackward.__init__(self, params, state, groups)
        adam_of = {adam.wrapped: adam for adam in self.lookups}
        LookupsHandle.__init__(
            self,
            inventory,
            wrapped,
            {adam.wrapped: partial(adam.look_up, loss_scale) for adam in self.lookups},
            lambda lookup, table, rows: adam_of[lookup].forget_rows(table, rows),
        )
        self._undo += restore
        for adam in self.lookups:
            adam.compile()
        for adams in self.collections:
            adams.hook(inventory.called[adams.collection])
            self._undo.append(adams.unhook)

    @property
    def lr(self) -> float:
        """Learning rate of the next step, in ``param_groups``.

        Raises ValueError: the rate is negative or not finite, or so high that rows would move that replay has set to
        rest; raised here and in the backward pass.
        """
        return self.collections[0].lr

    @lr.setter
    def lr(self, value: float) -> None:
        for collection in self.collections:
            collection.lr = value

    def remove(self) -> None:
        """Brings all rows up to date and detaches from the model, which then trains by its fused SGD again."""
        self.flush()
        super().remove()

    def flush(self) -> None:
        """Brings all rows and moments up to date; has no effect unless rows are replayed."""
        for adam in self.lookups:
            adam.flush()

    def set_ftrl_samples(self, samples: int) -> None:
        """Sets ``wide.batch_size`` of the coming steps, for a last, shorter batch; has no effect without FTRL."""
        for adam in self.lookups:
            adam.set_ftrl_samples(samples)

    def catch_up(self, table: str, rows: Tensor) -> None:
        """Brings distinct rows of a table, int64 [n], up to date if this process holds them and they are replayed."""
        for adam in self.lookups:
            for number, shard in enumerate(adam.lookup.shards):
                if adam.replays and table in (shard.name, shard.table.own_name):
                    held = rows[(rows >= shard.first_row) & (rows < shard.first_row + shard.rows)] - shard.first_row
                    first = adam.wrapped.layout.first_row[number]
                    adam.catch_up_rows(held.to(first.device) + first)

    @contextmanager
    def as_stored(self) -> Iterator[None]:
        """Makes states hold replayed rows as they are in memory, some of them behind, for checkpoints without waiting.

        Take the states of the model and of this optimizer within ``as_stored``, and load both within ``as_stored``. In
        place of ``step``, a table then has ``last_step``, int32 [rows, 1] (see :class:`DeviceSteps`), and the last
        table of each collection has ``lrs``, a list of the learning rates of all steps.

        The optimizer that loads them needs the same ``config``, ``rule`` and ``lr_factors``, which are not checked:
        rows that are behind take their missed steps by these values.
        """
        with ExitStack() as stack:
            for collection in self.collections:
                stack.enter_context(collection.as_stored())
            yield

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state that is sharded like this optimizer's.

        Raises ValueError: a table or entry is missing or has another size, or the state was either taken or loaded
        within :meth:`as_stored`, but not both.
        """
        for collection in self.collections:
            collection.require_entries(state_dict["state"])
        super().load_state_dict(state_dict)

    @property
    def lookups(self) -> list[LookupAdam]:
        return [adam for collection in self.collections for adam in collection.lookups]

    @property
    def steps(self) -> int:
        """Largest number of steps of a collection. Setting it declares all rows to be those after that step."""
        return max((collection.step for collection in self.collections), default=0)

    @steps.setter
    def steps(self, value: int) -> None:
        for collection in self.collections:
            collection.step = value


def _require_rates(factors: Mapping[str, float], config: AdamConfig) -> None:
    for table, factor in factors.items():
        if not 0 <= factor < inf:
            raise UserError(f"lr_factors of table {table!r} must be at least 0 and finite, got {factor}")
        if config.lr * factor * config.weight_decay > 1:
            raise UserError(
                f"lr_factors gives table {table!r} the learning rate {config.lr * factor:g}, whose product with"
                f" weight_decay = {config.weight_decay:g} must be at most 1; lower one of them"
            )


class GraphedSteps:
    """Work of the host for the steps of ``adam`` that a CUDA graph repeats."""

    def __init__(self, adam: EmbeddingAdam):
        self._adam = adam

    @property
    def are_possible(self) -> bool:
        """True if a graph can repeat a step: the step reads all that changes from the device, and never waits."""
        adam = self._adam
        return adam.config.absent_rows != "dense" and all(lookup.wrapped.rows.is_capturable for lookup in adam.lookups)

    def prepare(self) -> None:
        """Prepares the device for the coming step, before the capture and before each replay of the graph."""
        for collection in self._adam.collections:
            collection.history.prepare(collection.step + 1, collection.lr)

    def count(self) -> None:
        """Counts a step that the graph has taken."""
        for collection in self._adam.collections:
            collection.count_step()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Takes back what the host counts while a step is captured, because the step is not taken."""
        with ExitStack() as stack:
            for collection in self._adam.collections:
                stack.callback(collection.history.forget_after, collection.step)
                for adam in collection.lookups:
                    stack.enter_context(adam.capturing())
            yield

    def addresses(self) -> tuple[int, ...]:
        """Addresses of the tensors that the graph reads; a changed address needs a new capture."""
        return tuple(tensor.data_ptr() for adam in self._adam.lookups for tensor in adam.replaceable())

    def read_by_graph(self) -> tuple[Tensor, ...]:
        """Tensors that must live as long as the graph is replayed."""
        return tuple(tensor for adam in self._adam.lookups for tensor in adam.read_by_graph())
