"""Adam for sharded embedding tables, with CowClip and coupled L2, on any device; absent rows wait, move, or catch up.

The lookup's own backward is replaced; its fused optimizer (plain SGD, which has no state) never runs. FBGEMM's Adam
exists for CUDA alone, moves touched rows only and decays weights apart from the gradient.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from itertools import repeat
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.profiler import record_function

from . import cpu_kernels
from .adam_formula import AdamConfig, AdamScalars, adam_constants, adam_element, adam_scalars
from .attach import LookupsHandle, check_lookup_inputs, hook_lookups, rows_to_clip
from .clip import ClipRule, NoClip
from .column_shards import take_from_first_shards
from .dense_adam import dense_adam_, dense_gradient, exact_root, row_squares
from .lookups import column_split_tables, leave_ddp, sharded_collections
from .replay import Replay, StepHistory, require_replayable
from .row_gradients import RowGradients
from .row_state import sharded_like_weights
from .row_updates import Backward, LookupRows, TableStats

EMBEDDING_UPDATE = "embedding_update"
"""What torch's profiler calls a lookup's backward."""
_NO_ROWS = np.empty(0, np.int32)
_ROWS_AT_ONCE = 1 << 20


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
        self._tables = [_LookupAdam(each, self) for each in rows]
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
        return _UpdateInBackward.apply(output.detach(), self._by_rows[rows], inputs, torch.ones((), requires_grad=True))

    def _replay_hooks(self) -> list[Any]:
        """Hooks that bring rows up to date: before a lookup its ids', before a state_dict all."""

        def before_lookup(tables: "_LookupAdam", replay: Replay) -> Any:
            def hook(_: nn.Module, args: tuple, kwargs: dict) -> None:
                check_lookup_inputs(kwargs)
                replay.bring_current(kwargs["indices"], kwargs["offsets"], tables.step)

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
    def forward(ctx: Any, output: Tensor, tables: "_LookupAdam", inputs: Mapping[str, Any], _: Tensor) -> Tensor:
        ctx.tables, ctx.inputs, ctx.step = tables, inputs, tables.step
        return output.view_as(output)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        inputs = ctx.inputs
        backward = Backward(inputs["indices"], inputs["offsets"], inputs.get("per_sample_weights"), grads[0])
        with record_function(EMBEDDING_UPDATE):
            ctx.tables.update(backward, step_of_lookup=ctx.step)
        return None, None, None, None


class _LookupAdam:
    """Moments and step count of one lookup; moments are flat, float32, laid out like the weights."""

    def __init__(self, rows: LookupRows, optimizer: EmbeddingAdam):
        self.rows = rows
        self.optimizer = optimizer
        weights = rows.lookup.flat_weights()
        self.exp_avg = torch.zeros(weights.numel(), device=weights.device)
        self.exp_avg_sq = torch.zeros(weights.numel(), device=weights.device)
        self.step = 0
        self.replay: Replay | None = None
        if optimizer.config.absent_rows == "replay":
            self.replay = Replay(rows, optimizer.config, optimizer.history, self.exp_avg, self.exp_avg_sq)

    def update(self, backward: Backward, step_of_lookup: int) -> None:
        """Takes a step; ``step_of_lookup`` is the one that its forward pass brought the rows to."""
        config, lr, replay = self.optimizer.config, self.optimizer.lr, self.replay
        if replay and step_of_lookup < self.step:
            replay.bring_current(backward.indices, backward.offsets, self.step)
        self.step += 1
        scalars = adam_scalars(config, lr, self.step)
        if config.absent_rows == "dense":
            self._update_all_rows(backward, scalars)
        elif self.rows.runs_compiled(backward):
            moments = (self.exp_avg.numpy(), self.exp_avg_sq.numpy())
            numbers = map(np.float32, (*astuple(adam_constants(config)), *astuple(scalars)))
            tracked = (_NO_ROWS, _NO_ROWS.astype(np.int64), self.step, 0.0)
            if replay:
                tracked = (replay.last_step.numpy(), replay.first_rows, self.step, replay.log_beta2)
            self.rows.run_kernel(cpu_kernels.adam_rows, backward, *moments, *numbers, *tracked)
        elif backward.indices.numel() or self.rows.waits_for_ranks:
            self._update_in_torch(backward, scalars)
        if replay:
            self.optimizer.history.record(self.step, lr)

    def _update_in_torch(self, backward: Backward, scalars: AdamScalars) -> None:
        sums, constants = self.rows.torch_sums(backward), adam_constants(self.optimizer.config)
        if self.replay and self.rows.gathers_rows:
            self.replay.bring_rows_current(sums, self.step - 1)
        rows = self.rows.torch_gradients(sums)
        rows.grad.add_(constants.twice_l2 * rows.weight)
        factors = self.rows.torch_factors(rows)[:, None]
        grad = torch.where(self.rows.clipped_lanes(rows), rows.grad * factors, rows.grad)
        exp_avg_sq = self.exp_avg_sq[rows.place]
        if self.replay:
            exp_avg_sq *= self.replay.take_step(rows, self.step)[:, None]
        stepped = adam_element(
            rows.weight,
            self.exp_avg[rows.place],
            exp_avg_sq,
            grad,
            *(constants.beta1, constants.rest1, constants.beta2, constants.rest2, constants.eps),
            *(scalars.step_size, scalars.denominator_scale),
            exact_root,
            torch.div,
        )
        for flat, value in zip((self.rows.lookup.flat_weights(), self.exp_avg, self.exp_avg_sq), stepped, strict=True):
            # Padding repeats a real row and its values, so that a place written twice is written the same.
            flat[rows.place] = torch.where(rows.inside, value, value[:, :1]).to(flat.dtype)

    def _update_all_rows(self, backward: Backward, scalars: AdamScalars) -> None:
        """The dense oracle on every table, a part of its rows at a time."""
        mine, config = self.rows, self.optimizer.config
        of_batch = None
        if backward.indices.numel() or mine.gathers_rows:
            of_batch = mine.torch_gradients(mine.torch_sums(backward))
        norms = self._norms_beyond_columns(of_batch)
        if of_batch:
            self._count_clipped(replace(of_batch, grad=of_batch.grad + 2 * config.l2 * of_batch.weight), norms)
        for table, shard in enumerate(mine.lookup.shards):
            limit, columns = mine.limits[table], mine.clip_columns[table]
            of_rows = norms[table].expand(2, shard.rows).split(_ROWS_AT_ONCE, dim=1) if norms else repeat(None)
            for part, of_part in zip(self._parts_of(table, of_batch), of_rows, strict=False):
                dense_adam_(*part, limit=limit, clip_columns=columns, config=config, scalars=scalars, norms=of_part)

    def _norms_beyond_columns(self, of_batch: RowGradients | None) -> list[Tensor] | None:
        """Norms of gradients and weights that limits hold for, float32 [2, V] or [2, 1] of each table.

        None where a row's columns here are all that decides its norm.
        """
        mine = self.rows
        if mine.scope == "row" and mine.columns is None:
            return None
        squares = [
            torch.cat(
                [
                    row_squares(weights, grad, clip_columns=columns, l2=self.optimizer.config.l2)
                    for weights, _, _, grad, _ in self._parts_of(table, of_batch)
                ],
                dim=1,
            )
            for table, columns in enumerate(mine.clip_columns)
        ]
        if mine.columns:
            return [each.sqrt().float() for each in mine.columns.add_up_tables(squares)]
        return list(mine.group_norms(torch.stack([each.sum(1) for each in squares], dim=1)).float().split(1, dim=1))

    def _parts_of(self, table: int, of_batch: RowGradients | None) -> Iterator[tuple[Tensor, ...]]:
        """Weights, moments, gradient and counts of a whole table, as dense_adam_ wants them, a part at a time."""
        lookup = self.rows.lookup
        views = [lookup.view_of(flat, table) for flat in (lookup.flat_weights(), self.exp_avg, self.exp_avg_sq)]
        whole = (*views, *dense_gradient(of_batch, table, lookup.weight_offsets[table], views[1]))
        yield from zip(*(each.split(_ROWS_AT_ONCE) for each in whole), strict=True)

    def _count_clipped(self, of_batch: RowGradients, norms: list[Tensor] | None) -> None:
        """Statistics of the batch's rows, whose gradients have their L2; dense_adam_ clips all rows by itself."""
        if norms is None or self.rows.scope == "row":
            self.rows.torch_factors(of_batch)
        else:
            self.rows.factors_of_norms(of_batch, *torch.cat(norms, dim=1)[:, of_batch.table])


def _device_of(model: nn.Module) -> torch.device:
    """The device that a sharded model's collectives run on."""
    return next(model.parameters()).device
