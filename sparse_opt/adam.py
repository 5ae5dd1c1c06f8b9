"""Adam for sharded embedding tables that moves only the rows of the batch, with CowClip and coupled L2, on any device.

The same meaning as FBGEMM's Adam, which exists for CUDA alone: touched rows only, bias correction by the number of
steps. The lookup's own backward is replaced; its fused optimizer (plain SGD, which has no state) never runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from . import cpu_kernels
from .attach import LookupsHandle, check_lookup_inputs, hook_lookups, rows_to_clip
from .clip import ClipRule, NoClip
from .lookups import sharded_like_weights
from .row_updates import Backward, LookupRows, TableStats


@dataclass(frozen=True)
class AdamConfig:
    """Adam's settings.

    Attributes:
        lr: learning rate, per step, >= 0.
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment, > 0.
        adam_epsilon: where eps goes. "torch": ``m_hat / (sqrt(v_hat) + eps)``; "keras" (the CowClip reference):
            ``sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps)``.
        l2: coefficient of ``l2 * sum(w^2)`` in the loss, over the touched rows: ``2 * l2 * w`` joins the gradient
            before the clip, >= 0.

    Raises:
        ValueError: a value out of range.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    adam_epsilon: Literal["torch", "keras"] = "torch"
    l2: float = 0.0

    def __post_init__(self) -> None:
        for key, value, fits in (
            ("lr", self.lr, 0 <= self.lr < inf),
            ("betas", self.betas, all(0 <= beta < 1 for beta in self.betas)),
            ("eps", self.eps, 0 < self.eps < inf),
            ("adam_epsilon", self.adam_epsilon, self.adam_epsilon in ("torch", "keras")),
            ("l2", self.l2, 0 <= self.l2 < inf),
        ):
            if not fits:
                raise ValueError(f"adam {key} is out of range, got {value!r}; see AdamConfig")


@dataclass(frozen=True)
class AdamScalars:
    """One step's Adam in the form ``w -= step_size * m / (sqrt(v) * denominator_scale + eps)``."""

    step_size: float
    denominator_scale: float


def adam_scalars(config: AdamConfig, lr: float, step: int) -> AdamScalars:
    """Learning rate and bias corrections of step ``step``, from 1. Source: arXiv 1412.6980, Algorithm 1, section 2."""
    first, second = 1 - config.betas[0] ** step, 1 - config.betas[1] ** step
    if config.adam_epsilon == "keras":
        return AdamScalars(lr * sqrt(second) / first, 1.0)
    return AdamScalars(lr / first, 1 / sqrt(second))


class EmbeddingAdam:
    """Lazy Adam over all sharded tables of a model, clipped by a rule.

    The tables must have been sharded under plain fused SGD (``EmbOptimType.EXACT_SGD``), whose update this replaces.

    Args:
        model: as in :func:`attach_cowclip`.
        config: Adam's settings.
        rule: clip rule; none by default.
        exclude: tables left unclipped (they are still trained).
        clip_columns: leading columns that are measured and clipped, for all tables or by name; bags may be of any kind.

    Raises:
        ValueError: as :func:`attach_cowclip`, or a table under another fused optimizer.
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
        self._tables = [
            _LookupAdam(rows, self) for rows in rows_to_clip(model, rule or NoClip(), exclude, clip_columns)
        ]
        for lookup in (tables.rows.lookup for tables in self._tables):
            if not lookup.is_plain_sgd:
                raise ValueError(
                    f"table {lookup.shards[0].name!r} is under fused {lookup.module.optimizer.name}, whose update"
                    " EmbeddingAdam would bypass; shard it under EmbOptimType.EXACT_SGD"
                )
        self._by_rows = {tables.rows: tables for tables in self._tables}
        self._handle: LookupsHandle = hook_lookups(
            [tables.rows for tables in self._tables], self._replace_backward, needs_id_weights=False
        )

    def stats(self) -> dict[str, TableStats]:
        """As :meth:`LookupsHandle.stats`."""
        return self._handle.stats()

    def remove(self) -> None:
        """Detaches from the model, which then trains by its fused SGD again."""
        self._handle.remove()

    def state_dict(self) -> dict[str, Any]:
        """Moments as ShardedTensors ``<table>.exp_avg`` and ``<table>.exp_avg_sq``, and the number of steps.

        The tensors share the optimizer's memory: loading into them in place (as torch.distributed.checkpoint does)
        restores them. All ranks must call together.
        """
        lookups = [tables.rows.lookup for tables in self._tables]
        state: dict[str, Any] = {"step": torch.tensor(self.steps)}
        for moment in ("exp_avg", "exp_avg_sq"):
            flats = [getattr(tables, moment) for tables in self._tables]
            sharded: dict[str, ShardedTensor] = sharded_like_weights(lookups, flats)
            state |= {f"{table}.{moment}": value for table, value in sharded.items()}
        return state

    @property
    def steps(self) -> int:
        """Steps taken so far."""
        return max((tables.step for tables in self._tables), default=0)

    @steps.setter
    def steps(self, value: int) -> None:
        for tables in self._tables:
            tables.step = value

    def _replace_backward(self, rows: LookupRows, inputs: Mapping[str, Any], output: Tensor) -> Tensor:
        check_lookup_inputs(inputs)
        id_weights = inputs.get("per_sample_weights")
        if id_weights is not None and id_weights.requires_grad:
            raise ValueError("ids' weights that are trained get no gradient under EmbeddingAdam; detach them")
        return _UpdateInBackward.apply(output.detach(), self._by_rows[rows], inputs, torch.ones((), requires_grad=True))


class _UpdateInBackward(torch.autograd.Function):
    """Identity whose backward updates the rows of a lookup; autograd goes no further."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, tables: "_LookupAdam", inputs: Mapping[str, Any], _: Tensor) -> Tensor:
        ctx.tables, ctx.inputs = tables, inputs
        return output.view_as(output)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        inputs = ctx.inputs
        ctx.tables.update(Backward(inputs["indices"], inputs["offsets"], inputs.get("per_sample_weights"), grads[0]))
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

    def update(self, backward: Backward) -> None:
        self.step += 1
        config = self.optimizer.config
        scalars = adam_scalars(config, self.optimizer.lr, self.step)
        if self.rows.runs_compiled(backward):
            decays = [number for beta in config.betas for number in (beta, 1 - beta)]
            numbers = (*decays, scalars.step_size, scalars.denominator_scale, config.eps, 2 * config.l2)
            moments = (self.exp_avg.numpy(), self.exp_avg_sq.numpy())
            self.rows.run_kernel(cpu_kernels.adam_rows, backward, *moments, *map(np.float32, numbers))
        elif backward.indices.numel():
            self._update_in_torch(backward, scalars)

    def _update_in_torch(self, backward: Backward, scalars: AdamScalars) -> None:
        config, rows = self.optimizer.config, self.rows.torch_gradients(backward)
        rows.grad.add_(rows.weight, alpha=2 * config.l2)
        factors = self.rows.torch_factors(rows)[:, None]
        grad = torch.where(self.rows.clipped_lanes(rows), rows.grad * factors, rows.grad)
        exp_avg = torch.lerp(self.exp_avg[rows.place], grad, 1 - config.betas[0])
        exp_avg_sq = torch.lerp(self.exp_avg_sq[rows.place], grad * grad, 1 - config.betas[1])
        weight = rows.weight - scalars.step_size * exp_avg / (
            exp_avg_sq.sqrt() * scalars.denominator_scale + config.eps
        )
        for flat, value in (
            (self.exp_avg, exp_avg),
            (self.exp_avg_sq, exp_avg_sq),
            (self.rows.lookup.flat_weights(), weight),
        ):
            # Padding repeats a real row and its values, so that a place written twice is written the same.
            flat[rows.place] = torch.where(rows.inside, value, value[:, :1]).to(flat.dtype)
