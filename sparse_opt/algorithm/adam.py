"""Adam for embedding rows: settings, the scalars of a step, and the update of one element.

Every back end (torch, numba and Triton) runs :func:`adam_element` in float32, in the order of operations written here,
with a correctly rounded square root and division. The dense update, the replay of missed steps and the lazy update are
therefore bit-identical wherever they take the same steps.
"""

from dataclasses import dataclass
from math import inf, sqrt
from typing import Literal, NamedTuple

from cowrec.errors import UserError


@dataclass(frozen=True)
class FtrlConfig:
    """FTRL-Proximal of single weights, without L1 and L2. Each weight has a learning rate of its own, which falls.

    The gradient g is that of the *sum* of the batch's losses, ``batch_size`` times that of their mean, so that alpha
    and beta are the same for all batch sizes. In a batch s times as large, a rare weight still has single samples, and
    its movement does not change. A frequent weight has 1/s of the steps. If the gradients of its samples mostly cancel,
    its movement for each sample does not change. If they agree, as at the start, the movement is 1/sqrt(s) as large.

    Attributes:
        alpha: learning rate, > 0: the first step is ``alpha * g / (beta + |g|)``.
        beta: added to the root of the sum of squares, > 0, in units of the gradient of one sample's loss.
        batch_size: samples of the global batch; :meth:`EmbeddingAdam.set_ftrl_samples` sets it for a shorter batch.

    Raises ValueError: a value is out of range.
    """

    alpha: float
    beta: float = 1.0
    batch_size: int = 1

    def __post_init__(self) -> None:
        for key, value in (("alpha", self.alpha), ("beta", self.beta), ("batch_size", self.batch_size)):
            if not 0 < value < inf:
                raise UserError(f"ftrl {key} must be > 0 and finite, got {value!r}")


@dataclass(frozen=True)
class AdamConfig:
    """Adam's settings.

    Attributes:
        lr: learning rate, per step, >= 0, until a schedule sets another; see :attr:`EmbeddingAdam.lr`.
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment, > 0.
        adam_epsilon: position of eps. "torch": ``m_hat / (sqrt(v_hat) + eps)``; "keras" (the CowClip reference):
            ``sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps)``.
        l2: coefficient of ``l2 * sum(w^2)`` in the loss: ``2 * l2 * w`` joins the gradient before the clip, >= 0.
        absent_rows: treatment of rows without an id in the batch. "lazy": they do not change. "dense": they take the
            step too, with the gradient ``2 * l2 * w`` clipped as for one occurrence. This is the paper's algorithm,
            which updates the whole table in every step. "replay": the results of "dense" at the cost of the batch's
            rows; a row takes its missed steps when its id occurs again or when the row is read.
        weight_decay: decoupled decay, >= 0 and at most 1 / lr: a step multiplies a row by ``1 - lr * weight_decay``
            beside the Adam step (AdamW: arXiv 1711.05101, Algorithm 2, with the learning rate as in torch). No clip
            bounds the decay. In float32, a decay below 3e-8 in a step is lost, and a decay below 1e-7 is inexact.
        wide: FTRL for the columns after ``clip_columns``; None for Adam. These columns have neither L2 nor weight decay
            nor the learning rate, and change in the batch's rows alone.

    Raises ValueError: a value is out of range.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    adam_epsilon: Literal["torch", "keras"] = "torch"
    l2: float = 0.0
    absent_rows: Literal["lazy", "dense", "replay"] = "replay"
    weight_decay: float = 0.0
    wide: FtrlConfig | None = None

    def __post_init__(self) -> None:
        for key, value, fits in (
            ("lr", self.lr, 0 <= self.lr < inf),
            ("betas", self.betas, all(0 <= beta < 1 for beta in self.betas)),
            ("eps", self.eps, 0 < self.eps < inf),
            ("adam_epsilon", self.adam_epsilon, self.adam_epsilon in ("torch", "keras")),
            ("l2", self.l2, 0 <= self.l2 < inf),
            ("weight_decay", self.weight_decay, 0 <= self.weight_decay < inf and self.lr * self.weight_decay <= 1),
            ("absent_rows", self.absent_rows, self.absent_rows in ("lazy", "dense", "replay")),
        ):
            if not fits:
                raise UserError(f"adam {key} is out of range, got {value!r}; see AdamConfig")


class AdamScalars(NamedTuple):
    """Adam in step t, in the form ``w -= decay * w + step_size * m / (sqrt(v) * denominator_scale + eps)``."""

    step_size: float
    denominator_scale: float
    decay: float


def adam_scalars(config: AdamConfig, lr: float, step: int) -> AdamScalars:
    """Scalars of step ``step``, from 1. Source: arXiv 1412.6980, Algorithm 1, section 2."""
    first, second = (1 - beta**step for beta in config.betas)
    decay = lr * config.weight_decay
    if config.adam_epsilon == "keras":
        return AdamScalars(lr * sqrt(second) / first, 1.0, decay)
    return AdamScalars(lr / first, 1 / sqrt(second), decay)


# Without annotations, as adam_element.
def table_scalars(scalars, lr_factor):  # type: ignore[no-untyped-def]
    """Scalars of a table whose learning rate is ``lr_factor`` times that of the step; both in float32."""
    return AdamScalars(scalars.step_size * lr_factor, scalars.denominator_scale, scalars.decay * lr_factor)


class AdamConstants(NamedTuple):
    """Numbers of all steps. Complements are computed in double, because 1 - 0.999 in float32 has an error of 1e-5."""

    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    eps: float
    twice_l2: float
    weight_decay: float


def adam_constants(config: AdamConfig) -> AdamConstants:
    """Constants of a configuration, in double; back ends round them to float32."""
    beta1, beta2 = config.betas
    return AdamConstants(beta1, 1 - beta1, beta2, 1 - beta2, config.eps, 2 * config.l2, config.weight_decay)


# Without annotations: Triton evaluates them and fails on Python types.
def adam_element(weight, first, second, gradient, constants, scalars, root, divide):  # type: ignore[no-untyped-def]
    """Takes one Adam step on one element, or on tensors of them; returns weight, first and second moment after it.

    Args:
        gradient: clipped, L2 included.
        constants, scalars: :class:`AdamConstants` and :class:`AdamScalars`, in the precision of the weight.
        root, divide: the back end's correctly rounded square root and division.
    """
    first = constants.beta1 * first + constants.one_minus_beta1 * gradient
    second = constants.beta2 * second + constants.one_minus_beta2 * (gradient * gradient)
    denominator = root(second) * scalars.denominator_scale + constants.eps
    weight = weight - scalars.decay * weight
    weight = weight - divide(scalars.step_size * first, denominator)
    return weight, first, second


class FtrlConstants(NamedTuple):
    """Numbers of :class:`FtrlConfig`; ``alpha`` may be that of a table."""

    alpha: float
    beta: float
    batch_size: float


def ftrl_constants(config: FtrlConfig | None) -> FtrlConstants:
    """Constants of a configuration, in double; for None, constants that no column uses."""
    return FtrlConstants(config.alpha, config.beta, config.batch_size) if config else FtrlConstants(0.0, 1.0, 0.0)


# Without annotations, as adam_element.
def ftrl_element(weight, squares, gradient, alpha, constants, root, divide):  # type: ignore[no-untyped-def]
    """Takes one FTRL step on one element, or on tensors of them; returns weight and sum of squared gradients after it.

    ``gradient`` is that of the mean loss, without L2 and not clipped. Source: McMahan et al. 2013, Algorithm 1 with
    lambda_1 = lambda_2 = 0. Its weight is then ``-z * alpha / (beta + sqrt(n))``, so that z need not be kept: ``z + g -
    sigma * w`` gives ``w - alpha * g / (beta + sqrt(n + g^2))``.
    """
    gradient = constants.batch_size * gradient
    squares = squares + gradient * gradient
    return weight - divide(alpha * gradient, root(squares) + constants.beta), squares
