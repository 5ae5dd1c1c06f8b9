"""Losses of samples: ``(logits, label) -> loss``. The training step takes the weighted mean.

Sizes: B samples, T tasks.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, TypeAlias

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from cowrec.errors import UserError

from .config import checked_options
from .own_code import chosen, is_import_path, tried

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Function from logits and labels, both float [B] or [B, T], to losses of the same shape."""


def bce(logits: Tensor, label: Tensor) -> Tensor:
    """Binary cross-entropy, in nats."""
    return F.binary_cross_entropy_with_logits(logits, label, reduction="none")


def focal(
    logits: Tensor,
    label: Tensor,
    *,
    gamma: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0,
    alpha: Annotated[float, Field(gt=0, lt=1)] | None = None,
) -> Tensor:
    """Cross-entropy times (1 - p)^gamma, where p is the probability of the sample's own class.

    A label y between 0 and 1 counts as y of a positive sample and 1 - y of another one. Source: Focal Loss (arXiv
    1708.02002), equations 4 and 5.

    Args:
        logits: float [B] or [B, T].
        label: of the same shape, from 0 to 1.
        gamma: exponent; 0 is the cross-entropy, and larger values lower the weight of samples predicted well.
        alpha: weight of positive samples; other samples have the weight 1 - alpha. By default both weights are 1.
    """
    # (1 - p)^gamma by its logarithm, whose gradient is finite where 1 - p is 0.
    positive = torch.exp(gamma * F.logsigmoid(-logits)) * bce(logits, torch.ones_like(logits))
    negative = torch.exp(gamma * F.logsigmoid(logits)) * bce(logits, torch.zeros_like(logits))
    weights = (1.0, 1.0) if alpha is None else (alpha, 1 - alpha)
    return label * positive * weights[0] + (1 - label) * negative * weights[1]


LOSSES: dict[str, Loss] = {"bce": bce, "focal": focal}


def loss_of(name: str, options: Mapping[str, Any], tasks: int = 1) -> Loss:
    """Returns the loss ``train.loss = name`` with ``train.loss_options``; tries a loss of the user's own.

    With 0 ``tasks``, whose number is not known yet, the loss is not tried. Raises ValueError: an unknown name or
    option, or a function that does not return the loss of each sample.
    """
    loss = chosen("train.loss", name, LOSSES, 'a loss of your own is "module:function"')
    if not callable(loss) or isinstance(loss, type):
        raise UserError(
            f'train.loss = "{name}" is of type {type(loss).__name__}, not a function (logits, label) -> loss of'
            " each sample"
        )
    given = checked_options(loss, options, "train.loss_options", f'train.loss = "{name}"', first=2)
    with_options: Loss = partial(loss, **given) if given else loss
    if is_import_path(name) and tasks:
        _check(name, with_options, (3, tasks) if tasks > 1 else (3,))
    return with_options


def _check(name: str, loss: Loss, shape: tuple[int, ...]) -> None:
    logits = torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape).requires_grad_()
    label = (torch.arange(logits.numel()) % 2).float().view(shape)
    given = f'train.loss = "{name}"'
    what = f"calling it with (logits, label) of shape {list(shape)}"
    found = tried(given, what, lambda: loss(logits, label), "it must return the loss of each")
    if not isinstance(found, Tensor) or found.shape != torch.Size(shape):
        has = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise UserError(
            f"{given} returned {has} for logits and labels of shape {list(shape)}; return the loss of each, of that"
            ' shape: the mean is taken afterwards, over all processes (torch\'s losses: reduction="none")'
        )
    if not found.requires_grad or torch.autograd.grad(found.sum(), logits, allow_unused=True)[0] is None:
        raise UserError(
            f"{given} does not depend on the logits, so that nothing would be trained; compute it from them"
        )
