"""Adam on the rows of one lookup: in numba on CPU, elsewhere in torch, and on all rows for the dense oracle."""

from collections.abc import Iterator
from dataclasses import astuple, replace
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from cowrec.sparse_opt.algorithm.adam import AdamConfig, AdamScalars, adam_constants, adam_element, adam_scalars
from cowrec.sparse_opt.clipping.clipped_lookup import Backward, LookupRows
from cowrec.sparse_opt.kernels import cpu_rows
from cowrec.sparse_opt.kernels.dense_adam import dense_adam_, dense_gradient, exact_root, row_squares
from cowrec.sparse_opt.kernels.torch_rows import LookupIds, RowGradients

from .replay import Replay, StepHistory

_NO_ROWS = np.empty(0, np.int32)
_ROWS_AT_ONCE = 1 << 20


class LookupAdam:
    """Moments and step count of one lookup.

    Args:
        rows: the lookup under its clip rule.
        config: Adam's settings.
        history: the optimizer's steps.

    Attributes:
        exp_avg, exp_avg_sq: flat, float32, laid out like the weights.
        step: steps taken.
        uses_triton: whether a Triton kernel updates whole rows, as on CUDA those of float32.
        replay: brings rows up to date under "replay", else None.
        ids: rows behind the ids of the latest lookup, from its replay to its output; None where nothing found them.
    """

    def __init__(self, rows: LookupRows, config: AdamConfig, history: StepHistory):
        self.rows = rows
        self.ids: LookupIds | None = None
        self._config, self._history = config, history
        weights = rows.lookup.flat_weights()
        self.exp_avg, self.exp_avg_sq = rows.lookup.zeros_of_weights(), rows.lookup.zeros_of_weights()
        self.step = 0
        self.uses_triton = weights.is_cuda and weights.dtype == torch.float32
        self.replay: Replay | None = None
        if config.absent_rows == "replay":
            self.replay = Replay(rows, config, history, self.exp_avg, self.exp_avg_sq)

    def update(self, backward: Backward, lr: float, step_of_lookup: int) -> None:
        """Takes a step; ``step_of_lookup`` is the one that its forward pass brought the rows to."""
        config, replay = self._config, self.replay
        if replay and step_of_lookup < self.step:
            replay.catch_up(backward.indices, backward.offsets, self.step)
        self.step += 1
        scalars = adam_scalars(config, lr, self.step)
        if config.absent_rows == "dense":
            self._update_all_rows(backward, scalars)
        elif self.rows.runs_compiled(backward) and not self.uses_triton:
            moments = (self.exp_avg.numpy(), self.exp_avg_sq.numpy())
            numbers = map(np.float32, (*astuple(adam_constants(config)), *astuple(scalars)))
            tracked = (_NO_ROWS, _NO_ROWS.astype(np.int64), self.step, 0.0)
            if replay:
                tracked = (replay.last_step.numpy(), replay.first_rows, self.step, replay.log_beta2)
            self.rows.run_kernel(cpu_rows.adam_rows, backward, *moments, *numbers, *tracked)
        elif backward.indices.numel() or self.rows.waits_for_ranks:
            self._update_in_torch(backward, scalars)
        if replay:
            self._history.record(self.step, lr)

    def forget(self, elements: Tensor, shard: Tensor, row: Tensor) -> None:
        """Makes rows that were given to new ids those of ids that have taken no step.

        Args:
            elements: places of their weights in the flat tensors, int64 [n, D].
            shard: numbers of their shards in the lookup, int64 [n], on the CPU.
            row: their places in those, int64 [n], on the CPU.
        """
        self.exp_avg[elements] = 0
        self.exp_avg_sq[elements] = 0
        if self.replay:
            places = torch.from_numpy(self.replay.first_rows)[shard] + row
            self.replay.last_step[places.to(elements.device)] = self.step

    def _update_in_torch(self, backward: Backward, scalars: AdamScalars) -> None:
        sums, constants = self.rows.torch_sums(backward), adam_constants(self._config)
        if self.replay and self.rows.gathers_rows:
            self.replay.bring_rows_current(sums, self.step - 1)
        decays = self.replay.take_step(sums, self.step) if self.replay else None
        if self.uses_triton and self.rows.decides_alone:
            from cowrec.sparse_opt.kernels.triton_rows import update_rows_on_device

            flats = (self.rows.lookup.flat_weights(), self.exp_avg, self.exp_avg_sq)
            numbers = (*astuple(constants), *astuple(scalars))
            ratios = update_rows_on_device(
                sums, self.rows.layout, self.rows.limit_tensors, decays, *flats, scalars=numbers
            )
            self.rows.keep_ratios(ratios, sums)
            return
        rows = self.rows.torch_gradients(sums)
        rows.grad.add_(constants.twice_l2 * rows.weight)
        factors = self.rows.torch_factors(rows)[:, None]
        grad = torch.where(self.rows.clipped_lanes(rows), rows.grad * factors, rows.grad)
        exp_avg_sq = self.exp_avg_sq[rows.place]
        if decays is not None:
            exp_avg_sq *= decays[:, None]
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
        mine, config = self.rows, self._config
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
                    row_squares(weights, grad, clip_columns=columns, l2=self._config.l2)
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
