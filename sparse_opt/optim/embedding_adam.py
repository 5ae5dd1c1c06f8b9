"""Adam for sharded embedding tables, with CowClip and coupled L2, on any device; absent rows wait, move, or catch up.

The lookup's own backward is replaced; its fused optimizer (plain SGD, which has no state) never runs. FBGEMM's Adam
exists for CUDA alone, moves touched rows only and decays weights apart from the gradient.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.profiler import record_function

from cowrec.sparse_opt.algorithm.adam import AdamConfig
from cowrec.sparse_opt.algorithm.clip import ClipRule, NoClip
from cowrec.sparse_opt.clipping.attach import LookupsHandle, check_lookup_inputs, hook_lookups, rows_to_clip
from cowrec.sparse_opt.clipping.clipped_lookup import Backward, LookupRows, TableStats
from cowrec.sparse_opt.tbe.column_shards import take_from_first_shards
from cowrec.sparse_opt.tbe.lookup import column_split_tables, leave_ddp, sharded_collections
from cowrec.sparse_opt.tbe.sharded_state import sharded_like_weights

from .lookup_adam import LookupAdam
from .replay import Replay, StepHistory, require_replayable

EMBEDDING_UPDATE = "embedding_update"
"""What torch's profiler calls a lookup's backward."""


class EmbeddingAdam:
    """Adam over all sharded tables of a model, clipped by a rule; ``config.absent_rows`` says which rows a step moves.

    The tables must have been sharded under plain fused SGD (``EmbOptimType.EXACT_SGD``), whose update this replaces;
    data-parallel tables have none, and are no longer a matter of their DistributedDataParallel and the dense optimizer.
    Set ``lr`` between steps to follow a schedule. Every lookup must take part in every step.

    Under ``absent_rows = "replay"`` rows are brought up to date when a forward pass looks them up, in training and in
    evaluation, and all of them when the model's ``state_dict()`` is taken; neither changes a bit of what training then
    does. Other ways of reading the tables' memory need :meth:`flush` first. Weights loaded by the model's
    ``load_state_dict`` count as those after the latest step.

    Args:
        model: as in :func:`attach_cowclip`.
        config: Adam's settings.
        rule: clip rule; none by default.
        exclude: tables left unclipped (they are still trained).
        clip_columns: leading columns that are measured and clipped, for all tables or by name; bags may be of any kind.

    Raises:
        ValueError: as :func:`attach_cowclip`, a table under another fused optimizer or one that cannot be replayed, or
            a rule for more than a row under "replay".
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
        rule = rule or NoClip()
        self._column_ranks = column_split_tables(model)
        if config.absent_rows == "replay":
            require_replayable(rule, config, sorted(self._column_ranks.keys() - set(exclude)))
        rows = rows_to_clip(model, rule, exclude, clip_columns, replicated=True)
        for lookup in (each.lookup for each in rows):
            if not lookup.is_plain_sgd:
                raise ValueError(
                    f"table {lookup.shards[0].name!r} is under fused {lookup.module.optimizer.name}, whose update"
                    " EmbeddingAdam would bypass; shard it under EmbOptimType.EXACT_SGD"
                )
        self.history = StepHistory(config, _device_of(model))
        self._tables = [LookupAdam(each, config, self.history) for each in rows]
        self._by_rows = {tables.rows: tables for tables in self._tables}
        self._collections = list(sharded_collections(model))
        self._rejoin_ddp = [leave_ddp(collection) for collection in self._collections]
        self._handle: LookupsHandle = hook_lookups(rows, self._replace_backward, needs_id_weights=False)
        self._raw = False
        self._hooks = self._replay_hooks() if config.absent_rows == "replay" else []

    def stats(self) -> dict[str, TableStats]:
        """As :meth:`LookupsHandle.stats`."""
        return self._handle.stats()

    def remove(self) -> None:
        """Detaches from the model, with all rows up to date; it then trains by its fused SGD again."""
        if self._hooks:
            self.flush()
        for hook in self._hooks:
            hook.remove()
        for rejoin in self._rejoin_ddp:
            rejoin()
        self._hooks, self._rejoin_ddp = [], []
        self._handle.remove()

    def flush(self) -> None:
        """Brings every row and its moments up to date; nothing to do unless rows are replayed."""
        for tables in self._tables:
            if tables.replay:
                tables.replay.flush(tables.step)

    def catch_up(self, table: str, rows: Tensor) -> None:
        """Brings those of a table's rows (distinct, int64 [n]) up to date that this process holds.

        Nothing to do unless rows are replayed.
        """
        for tables in self._tables:
            for number, shard in enumerate(tables.rows.lookup.shards):
                if tables.replay and shard.name == table:
                    held = rows[(rows >= shard.first_row) & (rows < shard.first_row + shard.rows)] - shard.first_row
                    places = held.to(tables.replay.last_step.device) + int(tables.replay.first_rows[number])
                    tables.replay.bring_places_current(places, tables.step)

    @contextmanager
    def as_stored(self) -> Iterator[None]:
        """Within it the model's ``state_dict()`` has the rows as they lie in memory, some of them behind.

        For checkpoints, which hold this optimizer's state too (it says how far each row is), and for loading them.
        """
        self._raw = True
        try:
            yield
        finally:
            self._raw = False

    def state_dict(self) -> dict[str, Any]:
        """Moments ``<table>.exp_avg`` and ``<table>.exp_avg_sq``, sharded as the weights are, and the number of steps.

        Under "replay" also ``<table>.last_step``, int32 [rows, 1] (see :class:`Replay`), and the steps' ``lrs``,
        float64 [steps]. Rows of column-wise and data-parallel tables are then brought up to date first, because their
        parts or copies need not be equally far. The tensors share the optimizer's memory. All ranks must call together.

        Raises:
            ValueError: under "replay", lookups that have not taken the same steps.
        """
        for replay, step in self._unequal_replays():
            replay.flush(step)
        return self._state()

    def _state(self) -> dict[str, Any]:
        lookups = [tables.rows.lookup for tables in self._tables]
        steps, lrs = self._agreed_steps()
        state: dict[str, Any] = {"step": torch.tensor(steps)}
        if self.config.absent_rows == "replay":
            if any(tables.step != steps for tables in self._tables):
                raise ValueError(
                    f"lookups have taken {[tables.step for tables in self._tables]} of {steps} steps; rows can only be"
                    " replayed where every table takes part in every training step"
                )
            state["lrs"] = lrs
            with self.as_stored():
                last_steps = [tables.replay.last_step for tables in self._tables if tables.replay]
                of_rows = sharded_like_weights(self._collections, lookups, last_steps, torch.int32, per_row=True)
            state |= {f"{table}.last_step": value for table, value in of_rows.items()}
        for moment in ("exp_avg", "exp_avg_sq"):
            flats = [getattr(tables, moment) for tables in self._tables]
            with self.as_stored():
                of_elements = sharded_like_weights(self._collections, lookups, flats, torch.float32)
            state |= {f"{table}.{moment}": value for table, value in of_elements.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a state of :meth:`state_dict`, sharded as this optimizer's.

        Set :attr:`steps` to the checkpoint's before torch.distributed.checkpoint loads into a state, so that ``lrs``
        has its size.

        Raises:
            ValueError: a table or moment is missing.
        """
        own = self._state()
        missing = sorted(own.keys() - state.keys())
        if missing:
            raise ValueError(f"the optimizer's state has no {missing[0]!r}; it is of another model or absent_rows")
        for key, value in own.items():
            if isinstance(value, ShardedTensor):
                for mine, given in zip(value.local_shards(), state[key].local_shards(), strict=True):
                    mine.tensor.copy_(given.tensor)
            elif "." in key:
                value.copy_(state[key])
        for tables in self._tables:
            tables.step = int(state["step"])
        if "lrs" in own:
            self.history.replace(state["lrs"].numpy())
            parts = [
                (shard, tables.replay.last_step_of(table))
                for tables in self._tables
                for table, shard in enumerate(tables.rows.lookup.shards)
                if tables.replay
            ]
            take_from_first_shards(self._column_ranks, parts)

    @property
    def lookups(self) -> list[LookupAdam]:
        """What the optimizer keeps of each lookup of this process."""
        return list(self._tables)

    @property
    def steps(self) -> int:
        """Steps taken so far. Setting it takes the configured learning rate for that of all of them."""
        return max((tables.step for tables in self._tables), default=0)

    @steps.setter
    def steps(self, value: int) -> None:
        for tables in self._tables:
            tables.step = value
        for replay, step in self._unequal_replays():
            replay.mark_current(step)
        if self.config.absent_rows == "replay":
            self.history.replace(np.full(value, self.config.lr))

    def _unequal_replays(self) -> list[tuple[Replay, int]]:
        """Replays, with their steps, of lookups whose rows' parts or copies on other ranks may be differently far."""
        lookups = ((tables.replay, tables.rows.lookup, tables.step) for tables in self._tables)
        return [
            (replay, step) for replay, each, step in lookups if replay and (each.is_replicated or each.splits_columns)
        ]

    def _agreed_steps(self) -> tuple[int, Tensor]:
        """Steps taken, and their learning rates (float64 [steps]), also on ranks that hold no table and saw none."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self.steps, self.history.lrs.clone()
        device = self.history.step_sizes.device
        steps = torch.tensor(self.steps, device=device)
        dist.all_reduce(steps, dist.ReduceOp.MAX)
        lrs = torch.full((int(steps),), -1.0, dtype=torch.float64, device=device)
        lrs[: len(self.history.lrs)] = self.history.lrs.to(device)
        dist.all_reduce(lrs, dist.ReduceOp.MAX)
        return int(steps), lrs.cpu()

    def _replace_backward(self, rows: LookupRows, inputs: Mapping[str, Any], output: Tensor) -> Tensor:
        check_lookup_inputs(inputs)
        id_weights = inputs.get("per_sample_weights")
        if id_weights is not None and id_weights.requires_grad:
            raise ValueError("ids' weights that are trained get no gradient under EmbeddingAdam; detach them")
        tables, anchor = self._by_rows[rows], torch.ones((), requires_grad=True)
        return _UpdateInBackward.apply(output.detach(), self, tables, inputs, anchor)

    def _replay_hooks(self) -> list[Any]:
        """Hooks that bring rows up to date: before a lookup its ids', before a state_dict all."""

        def before_lookup(tables: "LookupAdam", replay: Replay) -> Any:
            def hook(_: nn.Module, args: tuple, kwargs: dict) -> None:
                check_lookup_inputs(kwargs)
                ids = replay.catch_up(kwargs["indices"], kwargs["offsets"], tables.step)
                tables.ids = ids if torch.is_grad_enabled() else None

            return hook

        def before_state_dict(*_: Any) -> None:
            for tables, replay in replayed:
                if not self._raw:
                    replay.bring_all_current(tables.step)

        def after_loading(*_: Any) -> None:
            for tables, replay in replayed:
                if not self._raw:
                    replay.mark_current(tables.step)

        replayed = [(tables, tables.replay) for tables in self._tables if tables.replay]
        hooks: list[Any] = []
        for tables, replay in replayed:
            tbe = tables.rows.lookup.module
            hooks.append(tbe.register_forward_pre_hook(before_lookup(tables, replay), with_kwargs=True))
        for collection in self._collections:
            hooks.append(collection.register_state_dict_pre_hook(before_state_dict))
            hooks.append(collection.register_load_state_dict_post_hook(after_loading))
        return hooks


class _UpdateInBackward(torch.autograd.Function):
    """Identity whose backward updates the rows of a lookup; autograd goes no further."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, optimizer: EmbeddingAdam, tables: LookupAdam, inputs: Mapping[str, Any], _: Tensor
    ) -> Tensor:
        ctx.optimizer, ctx.tables, ctx.inputs, ctx.step = optimizer, tables, inputs, tables.step
        ctx.ids, tables.ids = tables.ids, None
        return output.view_as(output)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None, None]:
        inputs = ctx.inputs
        id_weights = inputs.get("per_sample_weights")
        backward = Backward(inputs["indices"], inputs["offsets"], id_weights, grads[0], ctx.ids)
        with record_function(EMBEDDING_UPDATE):
            ctx.tables.update(backward, ctx.optimizer.lr, step_of_lookup=ctx.step)
        return None, None, None, None, None


def _device_of(model: nn.Module) -> torch.device:
    """The device that a sharded model's collectives run on."""
    return next(model.parameters()).device
