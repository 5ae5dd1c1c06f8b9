"""Adam for sharded embedding tables, with CowClip and coupled L2, on any device.

The backward of each lookup is replaced; the lookup's fused optimizer (plain SGD, which has no state) never runs.
FBGEMM's own Adam exists for CUDA only, updates the batch's rows only, and decays weights independently of the gradient.
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

    The tables must be sharded under plain fused SGD (``EmbOptimType.EXACT_SGD``), whose update this class replaces.
    Data-parallel tables leave their DistributedDataParallel, and the dense optimizer must not train them:
    ``torchrec.optim.optimizers.in_backward_optimizer_filter`` leaves them out.

    It is a KeyedOptimizer and takes the place of the model's ``fused_optimizer``, with the same state and rates.
    :meth:`step` and :meth:`zero_grad` do nothing, because the backward pass updates the tables, with the learning rate
    in ``param_groups`` at that time; learning rate schedulers and TorchRec's wrappers set it there.
    GradientClippingOptimizer clips dense gradients alone, as tables have none.

    The state of a table, by its weight's path, is ``exp_avg`` and ``exp_avg_sq``, float32, sharded like the weight, and
    ``step``, int64 []. Taking it brings all rows up to date first. This state and the model's may be taken and loaded
    in either order. The tensors share the optimizer's memory. All ranks must take and load it together. Of weights
    under FTRL, ``exp_avg_sq`` is the sum of squared gradients, and ``exp_avg`` 0.

    A collection takes a step in each of its backward passes; collections may take different numbers of steps. If an
    exception interrupts a backward pass, tables that others have left behind take that step without the batch's
    gradients, with a warning, when the next one begins.

    Under ``absent_rows = "replay"`` rows catch up when a forward pass looks them up, and all rows when the model's
    ``state_dict()`` is taken; neither changes the results of training. Call :meth:`flush` before reading or writing the
    tables' memory in other ways; a forward pass raises RuntimeError if rows were written while steps were owed. Weights
    that the model's ``load_state_dict`` loads are those after the latest step.

    Args:
        model, rule, exclude: as in :func:`attach_cowclip`; no rule by default. Excluded tables are trained.
        clip_columns: leading columns that are measured and clipped, for all tables or by name; bags may be of any kind.
        lr_factors: by table, a factor of the learning rate in ``param_groups``, hence also of weight decay, and of
            FTRL's alpha.
        grad_scaler: as in :func:`attach_cowclip`; a gradient of zeros takes a step too.

    Attributes:
        collections: Adam on the lookups of each sharded collection.

    Raises:
        ValueError: as :func:`attach_cowclip`, a table has another fused optimizer or cannot be replayed, the rule
            bounds more than a row under "replay", FTRL has no columns, or a scheduler drives the fused optimizers
            already.
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
        self.config, self.rule = config, NoClip() if rule is None else rule
        rules, given = table_rules(inventory, self.rule, exclude), dict(lr_factors or {})
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

        Raises:
            ValueError: it is negative or not finite, or replay has set rows to rest that would move under so high a
                rate; here and when the backward pass takes the step.
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
        """Brings every row and its moments up to date; has no effect unless rows are replayed."""
        for adam in self.lookups:
            adam.flush()

    def set_ftrl_samples(self, samples: int) -> None:
        """Sets ``wide.batch_size`` of the coming steps, as before a last, shorter batch; has no effect without FTRL."""
        for adam in self.lookups:
            adam.set_ftrl_samples(samples)

    def catch_up(self, table: str, rows: Tensor) -> None:
        """Brings rows of a table (distinct, int64 [n]) up to date, as far as they are replayed and held here."""
        for adam in self.lookups:
            for number, shard in enumerate(adam.lookup.shards):
                if adam.replays and table in (shard.name, shard.table.own_name):
                    held = rows[(rows >= shard.first_row) & (rows < shard.first_row + shard.rows)] - shard.first_row
                    first = adam.wrapped.layout.first_row[number]
                    adam.catch_up_rows(held.to(first.device) + first)

    @contextmanager
    def as_stored(self) -> Iterator[None]:
        """Makes states hold replayed rows as they are in memory, some of them behind, for checkpoints without waiting.

        Take the model's state and this optimizer's within it, and load both within it. In place of ``step`` a table
        then has ``last_step``, int32 [rows, 1] (see :class:`DeviceSteps`), and the last table of each collection
        ``lrs``, a list of the learning rates of all steps.

        Load them into an optimizer with the same ``config``, ``rule`` and ``lr_factors``, which are not checked: rows
        that are behind take their missed steps by these.
        """
        with ExitStack() as stack:
            for collection in self.collections:
                stack.enter_context(collection.as_stored())
            yield

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state that is sharded like this optimizer's.

        Raises:
            ValueError: a table or entry is missing or of another size; or the state was taken within :meth:`as_stored`
                and is loaded elsewhere, or the reverse.
        """
        for collection in self.collections:
            collection.require_entries(state_dict["state"])
        super().load_state_dict(state_dict)

    @property
    def lookups(self) -> list[LookupAdam]:
        return [adam for collection in self.collections for adam in collection.lookups]

    @property
    def steps(self) -> int:
        """Most steps that a collection has taken. Setting it declares all rows to be those after that step."""
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
    """What the host does for the steps of ``adam`` that a CUDA graph repeats."""

    def __init__(self, adam: EmbeddingAdam):
        self._adam = adam

    @property
    def are_possible(self) -> bool:
        """True if a graph can repeat a step: it reads all that changes from the device, and waits for nothing."""
        adam = self._adam
        return adam.config.absent_rows != "dense" and all(lookup.wrapped.rows.is_capturable for lookup in adam.lookups)

    def prepare(self) -> None:
        """Prepares the device for the coming step; call it before the capture and each replay of the graph."""
        for collection in self._adam.collections:
            collection.history.prepare(collection.step + 1, collection.lr)

    def count(self) -> None:
        """Counts a step that the graph has taken."""
        for collection in self._adam.collections:
            collection.count_step()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Takes back what the host counts while a step is captured, since none is taken."""
        with ExitStack() as stack:
            for collection in self._adam.collections:
                stack.callback(collection.history.forget_after, collection.step)
                for adam in collection.lookups:
                    stack.enter_context(adam.capturing())
            yield

    def addresses(self) -> tuple[int, ...]:
        """Addresses of the tensors that the graph reads; capture it again when one has changed."""
        return tuple(tensor.data_ptr() for adam in self._adam.lookups for tensor in adam.replaceable())

    def read_by_graph(self) -> tuple[Tensor, ...]:
        """Tensors of the graph, which must hold them as long as it is replayed."""
        return tuple(tensor for adam in self._adam.lookups for tensor in adam.read_by_graph())
