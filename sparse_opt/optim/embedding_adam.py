"""Adam for sharded embedding tables, with CowClip and coupled L2, on any device.

The backward of each lookup is replaced; the lookup's fused optimizer (plain SGD, which has no state) never runs.
FBGEMM's own Adam exists for CUDA only, updates the batch's rows only, and decays weights independently of the gradient.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from cowrec.sparse_opt.algorithm.adam import AdamConfig
from cowrec.sparse_opt.algorithm.clip import ClipRule, NoClip
from cowrec.sparse_opt.clipping.attach import Forward, Inputs, LookupsHandle, require_unattached, wrap_lookups
from cowrec.sparse_opt.clipping.clipped_lookup import ClippedLookup
from cowrec.sparse_opt.clipping.requirements import check_lookup_inputs, clipped_lookups
from cowrec.sparse_opt.clipping.statistics import TableStats
from cowrec.sparse_opt.tbe.discovery import (
    column_split_tables,
    leave_ddp,
    meant_tables,
    sharded_collections,
    table_names,
)

from .collection_adam import CollectionAdam
from .lookup_adam import LookupAdam
from .replay import Replay, require_replayable
from .update_in_backward import UpdateInBackward


class EmbeddingAdam:
    """Adam over all sharded tables of a model, with a clip rule; ``config.absent_rows`` sets which rows a step updates.

    The tables must be sharded under plain fused SGD (``EmbOptimType.EXACT_SGD``), whose update this class replaces.
    Data-parallel tables have no fused optimizer; they are removed from their DistributedDataParallel, and the dense
    optimizer must not train them. Set :attr:`lr` between steps to follow a schedule.

    A collection takes a step in each of its backward passes; collections may take different numbers of steps. If an
    exception interrupts a backward pass, tables that others have left behind take that step without the batch's
    gradients, with a warning, when the next one begins.

    Under ``absent_rows = "replay"`` rows catch up when a forward pass looks them up, in training and in evaluation, and
    all rows when the model's ``state_dict()`` is taken; neither changes the results of training. Call :meth:`flush`
    before reading the tables' memory in other ways. Weights loaded by the model's ``load_state_dict`` are taken to be
    those after the latest step.

    Args:
        model: as in :func:`attach_cowclip`.
        config: Adam's settings.
        rule: clip rule; none by default.
        exclude: tables left unclipped (they are trained).
        clip_columns: leading columns that are measured and clipped, for all tables or by name; bags may be of any kind.

    Attributes:
        config: settings of the next step.
        rule: clip rule of the next step.
        collections: Adam on the lookups of each sharded collection.

    Raises:
        ValueError: as :func:`attach_cowclip`, a table has another fused optimizer or cannot be replayed, or the rule
            bounds more than a row under "replay".
    """

    def __init__(
        self,
        model: nn.Module,
        config: AdamConfig,
        rule: ClipRule | None = None,
        *,
        exclude: Sequence[str] = (),
        clip_columns: int | Mapping[str, int] | None = None,
    ):
        self.config = config
        self.lr = config.lr
        self.rule = rule = rule or NoClip()
        column_ranks = column_split_tables(model)
        self._clipped_column_wise = sorted(column_ranks.keys() - meant_tables(model, exclude).keys())
        if config.absent_rows == "replay":
            require_replayable(rule, config, self._clipped_column_wise)
        clipped = clipped_lookups(model, rule, exclude, clip_columns, replicated=True)
        for lookup in (each.lookup for each in clipped):
            if not lookup.is_plain_sgd:
                raise ValueError(
                    f"table {lookup.shards[0].name!r} is under fused {lookup.module.optimizer.name}, whose update"
                    " EmbeddingAdam would bypass; shard it under EmbOptimType.EXACT_SGD"
                )
        require_unattached(clipped)
        device, names = next(model.parameters()).device, dict(table_names(model))
        self.collections = [
            CollectionAdam(
                path,
                module,
                [each for each in clipped if each.lookup.collection is module],
                config,
                {name: column_ranks[name] for name in names[module].values() if name in column_ranks},
                device,
            )
            for path, module in sharded_collections(model).items()
        ]
        self._adam_of = {adam.clipped: adam for adam in self.lookups}
        self._rejoin_ddp = [leave_ddp(module) for module in sharded_collections(model).values()]
        self._handle: LookupsHandle = wrap_lookups(clipped, self._look_up)
        for collection in self.collections:
            collection.hook()
        self._anchor = torch.ones((), requires_grad=True)

    @property
    def lr(self) -> float:
        """Learning rate of the next step; under "replay" at most ``config.lr``, which bounds how far rows at rest move.

        Raises:
            ValueError: on setting a rate that is negative, not finite, or above the bound.
        """
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        if not 0 <= value < inf:
            raise ValueError(f"EmbeddingAdam.lr must be >= 0 and finite, got {value}")
        if self.config.absent_rows == "replay" and value > self.config.lr * (1 + 1e-6):
            raise ValueError(
                f"EmbeddingAdam.lr = {value:g} is above AdamConfig.lr = {self.config.lr:g}, by which replay decides"
                " when a row is at rest; give AdamConfig the largest learning rate of the schedule"
            )
        self._lr = value

    def stats(self) -> dict[str, TableStats]:
        """Statistics as of :meth:`LookupsHandle.stats`."""
        return self._handle.stats()

    def latest_ratios(self) -> dict[str, Tensor]:
        """Ratios of the latest step, as of :meth:`LookupsHandle.latest_ratios`."""
        return self._handle.latest_ratios()

    def remove(self) -> None:
        """Brings all rows up to date and detaches from the model, which then trains by its fused SGD again."""
        self.flush()
        for collection in self.collections:
            collection.unhook()
        for rejoin in self._rejoin_ddp:
            rejoin()
        self._rejoin_ddp = []
        self._handle.remove()

    def flush(self) -> None:
        """Brings every row and its moments up to date; has no effect unless rows are replayed."""
        for adam, replay in self._replays():
            replay.flush(adam.step)

    def reconfigure(self, config: AdamConfig, rule: ClipRule | None = None, *, after: int | None = None) -> None:
        """Changes the settings of the coming steps, for training in stages, as with batches that grow.

        Brings all rows up to date first, with the earlier settings: under "replay" a pass over the tables. Bias
        corrections follow the betas of all steps. A CUDA graph of a step keeps the settings of its capture.

        Before :meth:`load_state_dict`, repeat the calls of the steps to load, with ``after``.

        Args:
            config: settings; ``absent_rows`` and ``adam_epsilon`` must be the earlier ones.
            rule: clip rule of the earlier kind, with other values; by default the earlier one.
            after: step after which they hold; by default the latest.

        Raises:
            ValueError: what must not change does, or absent rows could not be replayed.
        """
        rule = rule or self.rule
        for what, now, given in (
            ("absent_rows", self.config.absent_rows, config.absent_rows),
            ("adam_epsilon", self.config.adam_epsilon, config.adam_epsilon),
            ("the clip rule", self.rule.name, rule.name),
        ):
            if now != given:
                raise ValueError(f"{what} cannot change from {now!r} to {given!r}; make a new EmbeddingAdam")
        if config.absent_rows == "replay":
            require_replayable(rule, config, self._clipped_column_wise)
        if self.steps:
            self.flush()
        self.config, self.lr, self.rule = config, config.lr, rule
        for adam in self.lookups:
            adam.clipped.limits.set_rule(rule)
        for collection in self.collections:
            collection.reconfigure(config, after)

    def catch_up(self, table: str, rows: Tensor) -> None:
        """Brings rows of a table (distinct, int64 [n]) up to date, as far as this process holds them.

        Has no effect unless rows are replayed.
        """
        for adam, replay in self._replays():
            for number, shard in enumerate(adam.lookup.shards):
                if table in (shard.name, shard.table):
                    held = rows[(rows >= shard.first_row) & (rows < shard.first_row + shard.rows)] - shard.first_row
                    first = adam.clipped.layout.first_row[number]
                    replay.catch_up_rows(held.to(first.device) + first, adam.step)

    @contextmanager
    def as_stored(self) -> Iterator[None]:
        """Makes the model's ``state_dict()`` return the rows as they are in memory, some of them behind.

        For checkpoints that hold this optimizer's state too, which has the last step of each row, and to load them.
        """
        with ExitStack() as stack:
            for collection in self.collections:
                stack.enter_context(collection.as_stored())
            yield

    def state_dict(self) -> dict[str, Any]:
        """Moments ``<weight>.exp_avg`` and ``<weight>.exp_avg_sq``, sharded like weights, and ``<collection>.step``.

        Keys begin as those of the model's ``state_dict()``, less the names of wrappers: ``<weight>`` is a weight's key
        without ``.weight``, ``<collection>`` the path of a collection. Under "replay" also ``<weight>.last_step``,
        int32 [rows, 1] (see :class:`LastSteps`), and ``<collection>.lrs``, the learning rates of the steps, float64
        [steps]. All rows are then brought up to date first, so that it does not matter whether this state or the
        model's is taken first, or loaded first; within :meth:`as_stored` only those of column-wise and data-parallel
        tables, because their shards or copies may be at different steps. The tensors share the optimizer's memory. All
        ranks must call together.
        """
        return {key: value for each in self.collections for key, value in each.state().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state of :meth:`state_dict` that is sharded like this optimizer's.

        Set :attr:`steps` to the checkpoint's before torch.distributed.checkpoint loads into a state, so that ``lrs``
        has its size.

        Raises:
            ValueError: a table or moment is missing, or the state is of "replay" and this optimizer is not.
        """
        for collection in self.collections:
            collection.load(state)

    @property
    def lookups(self) -> list[LookupAdam]:
        """Adam on each lookup of this process."""
        return [adam for each in self.collections for adam in each.lookups]

    @property
    def steps(self) -> int:
        """Most steps that a collection has taken. Setting it sets all, and assumes the configured learning rate."""
        return max((each.step for each in self.collections), default=0)

    @steps.setter
    def steps(self, value: int) -> None:
        for each in self.collections:
            each.step = value

    @property
    def is_capturable(self) -> bool:
        """True if a CUDA graph can repeat a step: it reads all that changes from the device, and waits for nothing."""
        return self.config.absent_rows != "dense" and all(adam.clipped.runs_on_device for adam in self.lookups)

    def prepare_step(self) -> None:
        """Prepares the device for the coming step of a CUDA graph; call it before the capture and each replay."""
        for each in self.collections:
            each.history.prepare(each.step + 1, self.lr)

    def count_step(self) -> None:
        """Counts a step that a captured CUDA graph has taken."""
        for each in self.collections:
            each.count_step(self.lr)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Takes back what the host counts while a CUDA graph of a step is captured, since none is taken."""
        with ExitStack() as stack:
            for each in self.collections:
                stack.enter_context(each.capturing())
            yield

    def addresses(self) -> tuple[int, ...]:
        """Addresses of the tensors of a captured CUDA graph; capture it again when one has changed."""
        return tuple(address for adam in self.lookups for address in adam.addresses())

    def _replays(self) -> Iterator[tuple[LookupAdam, Replay]]:
        for each in self.collections:
            yield from each.replays()

    def _look_up(self, clipped: ClippedLookup, forward: Forward, inputs: Inputs) -> Tensor:
        """Forward of a lookup: its rows catch up, are looked up, and are updated in its backward."""
        adam = self._adam_of[clipped]
        if adam.replay:
            check_lookup_inputs(inputs)
        ids = adam.catch_up(inputs["indices"], inputs["offsets"])
        id_weights = inputs.get("per_sample_weights")
        with torch.no_grad():
            if clipped.lookup.pools_on_cpu and inputs.get("batch_size_per_feature_per_rank") is None:
                output = clipped.lookup.pool_on_cpu(inputs["indices"], inputs["offsets"], id_weights)
            else:
                output = forward(**inputs)
        if not torch.is_grad_enabled():
            return output
        check_lookup_inputs(inputs)
        if id_weights is not None and id_weights.requires_grad:
            raise ValueError("ids' weights that are trained get no gradient under EmbeddingAdam; detach them")
        updating: Tensor = UpdateInBackward.apply(output, adam, lambda: self.lr, inputs, ids, self._anchor)
        return updating
