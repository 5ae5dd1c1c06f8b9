"""Forward and backward of a wrapped lookup: one autograd function with two strategies of its backward pass.

FBGEMM updates a table inside the backward of its lookup. :class:`RescaledGradients` changes what that backward reads,
so that FBGEMM applies exactly the clipped row gradient. :class:`ReplacedUpdate` runs an update of its own instead.
"""

import gc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import get_ident
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed import ProcessGroup

from cowrec.errors import UserError

from ..kernels.layout import LookupBackward, LookupBags, LookupIds
from .row_backends import Inputs
from .wrapped_lookup import WrappedLookup

Forward: TypeAlias = Callable[..., Tensor]
Expect: TypeAlias = Callable[[LookupBackward, float, Tensor | None], None]
"""Function of the unscaled backward pass, the coefficient of L2, and the factors of the ids."""


@dataclass(frozen=True)
class Unscaled:
    """A backward pass of a lookup without the scale of the loss."""

    # the pass with the output gradient of the unscaled loss, at least float32; zeros if a gradient was not finite
    backward: LookupBackward
    scaled_grad: Tensor  # output gradient of the scaled loss, in its own dtype; zeros if a gradient was not finite
    factor: Tensor | None = None  # 1 / scale, float32 []; None without a scale
    finite: Tensor | None = None  # whether all of the output gradient was finite, bool []; None without a scale


class LossScale:
    """Scale of a model's loss. Without a scaler, the first backward pass warns if the process has one in use."""

    def __init__(self, scaler: GradScaler | None):
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._is_checked = scaler is not None

    @property
    def is_used(self) -> bool:
        return self._scaler is not None

    def unscaled(self, backward: LookupBackward, groups: Sequence[ProcessGroup]) -> Unscaled:
        """Divides the output gradient by the scale; ranks of a group agree on whether all gradients are finite."""
        grad = backward.output_grad
        if self._scaler is None:
            self._warn_once()
            return Unscaled(backward, grad)
        scale = self._scaler.scale(torch.ones((), dtype=torch.float32, device=grad.device))
        assert isinstance(scale, Tensor)
        factor, on_all = scale.double().reciprocal().float(), grad.isfinite().all().int()
        for group in groups:
            dist.all_reduce(on_all, dist.ReduceOp.MIN, group=group)
        finite = on_all.bool()
        scaled = torch.where(finite, grad, 0)
        return Unscaled(replace(backward, output_grad=scaled.float() * factor), scaled, factor, finite)

    def _warn_once(self) -> None:
        if self._is_checked:
            return
        self._is_checked = True
        for scaler in grad_scalers_in_use():
            warnings.warn(
                f"a GradScaler with scale {scaler.get_scale():g} is in use, and the tables were attached without it. If"
                " it scales this model's loss, row gradients are measured and applied multiplied by that scale: pass"
                " grad_scaler=scaler to attach_cowclip or EmbeddingAdam. If it does not, pass"
                " grad_scaler=GradScaler(enabled=False)",
                RuntimeWarning,
                stacklevel=2,
            )


def grad_scalers_in_use() -> list[GradScaler]:
    """Finds the enabled scalers of this process that have scaled a loss, by a search of the heap: call it once."""
    gc.collect()  # scalers of earlier models may be in reference cycles
    referrers = gc.get_referrers(*_with_subclasses(GradScaler))
    scalers = [referrer for referrer in referrers if isinstance(referrer, GradScaler)]
    # The scale is None until the first loss; get_scale() tells the initial one then.
    return [scaler for scaler in scalers if scaler.is_enabled() and scaler._scale is not None]


def _with_subclasses(kind: Any) -> set[Any]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


class Gradients(NamedTuple):
    """Gradients that the backward of a lookup returns."""

    output: Tensor | None = None  # gradient that FBGEMM's backward reads; None if FBGEMM's backward does not run
    parameter: Tensor | None = None  # gradient of the lookup's weights, where a dense optimizer applies it
    id_weights: Tensor | None = None  # gradient of the ids' weights, or a summand of FBGEMM's gradient of them


@dataclass(frozen=True)
class ReplacedUpdate:
    """Runs an update in place of FBGEMM's."""

    # function of the unscaled backward pass, or of all accumulated passes of a step; returns the gradient of
    # ``parameter``
    update: Callable[[LookupBackward], Tensor | None]
    parameter: Tensor | None = None  # weights of the lookup, where a dense optimizer applies their scaled gradient

    def run(self, wrapped: WrappedLookup, given: LookupBackward, unscaled: Unscaled, weights: bool) -> Gradients:
        """Runs in the backward pass ``given``; ``weights`` tells whether the ids' weights need a gradient."""
        of_weights = wrapped.in_torch.id_weight_grad(given) if weights else None
        step = wrapped.accumulation.add(unscaled.backward, unscaled.finite)
        grad = self.update(step) if step else None
        if unscaled.factor is not None and unscaled.finite is not None and self.parameter is not None:
            # Not finite where the pass was not, so that the GradScaler skips the step.
            summand = torch.where(unscaled.finite, 0.0, torch.nan)
            grad = summand.expand(self.parameter.shape) if grad is None else grad / unscaled.factor + summand
        return Gradients(parameter=grad, id_weights=of_weights)


@dataclass(frozen=True)
class RescaledGradients:
    """Clips what FBGEMM's backward reads; that backward follows."""

    single_id_bags: bool  # as in attach_cowclip
    l2: float  # as in attach_cowclip; above 0 only with bags of one id
    check: Callable[[Tensor], Expect | None]  # makes the check of the update from the output of a forward pass
    # ids' weights that FBGEMM's backward reads and the clip scales; None where bags hold at most one id: the clip then
    # replaces the output gradient
    weights: Tensor | None = None
    expect: Expect | None = None  # check of the forward pass

    def run(self, wrapped: WrappedLookup, given: LookupBackward, unscaled: Unscaled, weights: bool) -> Gradients:
        """See :meth:`ReplacedUpdate.run`."""
        backward, grad, finite, factors = unscaled.backward, unscaled.scaled_grad, unscaled.finite, None
        if self.weights is None:
            require_single_ids(backward.bags, backward.id_weights)
            grad = wrapped.rows.clipped_output_grad(backward, self.l2)
            if finite is not None:
                grad.mul_(finite)  # no L2 either
        else:
            # Scaling the ids' weights scales the update. They are written anew in every backward of a forward.
            factors = wrapped.rows.id_factors(backward)
            if unscaled.factor is not None:
                factors *= unscaled.factor  # not the gradient, which may be in half precision
            own = given.id_weights
            self.weights.data.copy_(factors if own is None else own * factors)
        if self.expect and (finite is None or finite):
            self.expect(backward, self.l2, factors)
        of_weights = None
        if weights and finite is not None and given.id_weights is not None:
            # FBGEMM's gradient is finite, and hides the overflow.
            of_weights = given.id_weights.new_tensor(torch.nan).where(~finite, 0).expand_as(given.id_weights)
        return Gradients(grad, id_weights=of_weights)


def require_single_ids(bags: LookupBags, id_weights: Tensor | None) -> None:
    """Raises ValueError if a bag holds more than one id, or ids have weights; on CUDA the device asserts the former."""
    within = (bags.offsets[1:] - bags.offsets[:-1] <= 1).all()
    if within.is_cuda:
        torch._assert_async(within, "a bag holds more than one id but CowClip was attached with single_id_bags=True")
    elif not within:
        raise UserError("a bag holds more than one id; attach CowClip with single_id_bags=False")
    if id_weights is not None:
        raise UserError("the lookup has ids' weights or mean pooling; attach CowClip with single_id_bags=False")


def look_up_replaced(
    output: Tensor,
    wrapped: WrappedLookup,
    bags: LookupBags,
    inputs: Inputs,
    strategy: ReplacedUpdate,
    loss_scale: LossScale,
    ids: LookupIds | None = None,
) -> Tensor:
    """Makes the backward of a lookup run an update; returns ``output``, which had no gradient, in the same memory.

    ``inputs`` are those of the lookup's forward. The ids' weights among them get a gradient if they require one.
    """
    parameter = strategy.parameter
    if parameter is None:
        # Makes autograd record the lookup, whose inputs are integers.
        parameter = torch.ones((), dtype=torch.float32, requires_grad=True)
    id_weights = inputs.get("per_sample_weights")
    recorded: Tensor = _Backward.apply(output, parameter, id_weights, wrapped, bags, ids, strategy, loss_scale)
    return recorded


def look_up_rescaled(
    forward: Forward,
    wrapped: WrappedLookup,
    bags: LookupBags,
    inputs: Inputs,
    strategy: RescaledGradients,
    loss_scale: LossScale | None,
) -> Tensor:
    """Looks rows up by FBGEMM's forward, and makes its backward read clipped gradients.

    ``loss_scale`` is None in the pass that takes the step of accumulated passes.
    """
    given, weights, arguments = inputs.get("per_sample_weights"), None, dict(inputs)
    if not (strategy.single_id_bags or wrapped.lookup.is_sequence):
        weights = arguments["per_sample_weights"] = _scalable_weights(given, bags.indices)
        if not (weights.is_cuda or weights.requires_grad):
            # FBGEMM would compute a gradient of the weights, which nobody needs.
            arguments["feature_requires_grad"] = torch.zeros(len(wrapped.lookup.feature_table), dtype=torch.int32)
    # Other hooks on saved tensors, such as those that offload activations, would give copies to both backward passes.
    with torch.autograd.graph.saved_tensors_hooks(_with_version, _of_version):
        output = forward(**arguments)
        if not output.requires_grad:
            return output
        strategy = replace(strategy, weights=weights, expect=strategy.check(output))
        clipping: Tensor = _Backward.apply(output, None, given, wrapped, bags, None, strategy, loss_scale)
    return clipping


def _scalable_weights(given: Tensor | None, indices: Tensor) -> Tensor:
    """Copies the ids' weights, or makes ones, for the clip to change."""
    if given is None:
        return torch.ones(indices.numel(), dtype=torch.float32, device=indices.device)
    return given.float().clone()


def _with_version(saved: Tensor) -> tuple[Tensor, int]:
    return saved, saved._version


def _of_version(packed: tuple[Tensor, int]) -> Tensor:
    """Makes the check that autograd makes of the tensors that it saves itself."""
    saved, version = packed
    if saved._version != version:
        raise RuntimeError("ids or their weights were modified by an inplace operation between forward and backward")
    return saved


class _Backward(torch.autograd.Function):
    """Identity in the memory of a lookup's output, whose backward runs a strategy."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        parameter: Tensor | None,
        id_weights: Tensor | None,
        wrapped: WrappedLookup,
        bags: LookupBags,
        ids: LookupIds | None,
        strategy: ReplacedUpdate | RescaledGradients,
        loss_scale: LossScale | None,
    ) -> Tensor:
        ctx.save_for_backward(bags.indices, bags.offsets, id_weights)
        ctx.blocks, ctx.size, ctx.ids, ctx.thread, ctx.has_run = bags.blocks, bags.size, ids, get_ident(), False
        ctx.wrapped, ctx.strategy, ctx.loss_scale = wrapped, strategy, loss_scale
        if output._is_view():  # as FBGEMM's output of a variable batch size on CUDA; autograd refuses to mark it dirty
            return output.view_as(output)
        ctx.mark_dirty(output)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        indices, offsets, id_weights = ctx.saved_tensors
        wrapped: WrappedLookup = ctx.wrapped
        given = LookupBackward(LookupBags(indices, offsets, ctx.blocks, ctx.size), id_weights, grads[0], ctx.ids)
        if ctx.loss_scale is None:
            unscaled = Unscaled(given, grads[0])
        else:
            wrapped.begin_backward(is_repeated=ctx.has_run, forward_thread=ctx.thread)
            ctx.has_run = True
            unscaled = ctx.loss_scale.unscaled(given, wrapped.step_groups)
        return *ctx.strategy.run(wrapped, given, unscaled, ctx.needs_input_grad[2]), *(None,) * 5
