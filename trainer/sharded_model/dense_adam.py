"""Dense optimizer: Adam whose learning rate is set before every step, in memory that a captured CUDA graph reads."""

from collections.abc import Callable, Mapping
from math import inf, sqrt

import torch
from torch import Tensor, nn

from cowrec.sparse_opt import Hyperparameters


class DenseAdam:
    """Adam by torch's fused kernel, with decoupled weight decay AdamW; the learning rate is set before every step.

    Everything that changes from step to step is a tensor on the parameters' device. Epsilon is a number, hence
    constant: Keras' form, ``lr * sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps)``, is torch's form for infinitely
    many steps, whose corrections ``1 - b^t`` are 1, at a learning rate that contains both corrections.

    It takes the calls of a torch.optim.Optimizer that pipelines make, in a fifth of the host time of torch's Adam.

    Args:
        hyperparameters: betas, eps and weight decay.
        admits: called once the gradients of a step are complete; False leaves the step out. By default all are taken.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        hyperparameters: Hyperparameters,
        adam_epsilon: str,
        admits: Callable[[], bool] | None = None,
    ) -> None:
        device = next(iter(parameters.values())).device
        self._parameters, self._hyperparameters = dict(parameters), hyperparameters
        self._rate, self._rate_now = torch.zeros((), device=device), 0.0
        self._kept = torch.ones((), device=device)
        self._passes, self._passes_taken = 1, 0
        self._admits = admits or (lambda: True)
        self._corrects_in_rate = adam_epsilon == "keras"
        steps = inf if self._corrects_in_rate else 0.0
        self._state = {
            name: {
                "exp_avg": torch.zeros_like(each),
                "exp_avg_sq": torch.zeros_like(each),
                "step": torch.full((), steps, device=device),
            }
            for name, each in self._parameters.items()
        }

    def prepare(self, step: int, lr: float) -> None:
        """Sets the learning rate of step ``step``, counted from 0, on the device."""
        rate = lr
        if self._corrects_in_rate:
            first, second = (beta ** (step + 1) for beta in self._hyperparameters.betas)
            rate *= sqrt(1 - second) / (1 - first)
        if rate != self._rate_now:
            self._rate.fill_(rate)
            self._rate_now = rate
        if self._hyperparameters.dense_weight_decay:
            self._kept.fill_(1 - lr * self._hyperparameters.dense_weight_decay)

    def accumulate(self, passes: int) -> None:
        """Makes one step of every ``passes`` calls of :meth:`step`, whose gradients add up."""
        assert not self._passes_taken
        self._passes = passes

    def zero_grad(self) -> None:
        """Drops the gradients; has no effect between the passes of a step."""
        if not self._passes_taken:
            for parameter in self._parameters.values():
                parameter.grad = None

    def step(self) -> None:
        """Takes a step, after the last one of its passes, of the parameters that have gradients."""
        self._passes_taken = (self._passes_taken + 1) % self._passes
        if self._passes_taken or not self._admits():
            return
        trained = {name: each for name, each in self._parameters.items() if each.grad is not None}
        values, own = self._hyperparameters, [self._state[name] for name in trained]
        parameters: list[Tensor] = list(trained.values())
        if not parameters:
            return
        steps = [each["step"] for each in own]
        with torch.no_grad():
            if values.dense_weight_decay:  # as torch's AdamW, but the rate here may contain bias corrections
                torch._foreach_mul_(parameters, self._kept)
            if not self._corrects_in_rate:
                torch._foreach_add_(steps, 1)
            torch._fused_adam_(
                parameters,
                [each.grad for each in parameters if each.grad is not None],
                [each["exp_avg"] for each in own],
                [each["exp_avg_sq"] for each in own],
                [],
                steps,
                lr=self._rate,
                beta1=values.betas[0],
                beta2=values.betas[1],
                weight_decay=0.0,
                eps=values.eps,
                amsgrad=False,
                maximize=False,
            )

    def addresses(self) -> tuple[int, ...]:
        """Addresses of the tensors that a captured CUDA graph of a step reads and writes."""
        tensors = [
            self._rate,
            self._kept,
            *self._parameters.values(),
            *(each for own in self._state.values() for each in own.values()),
        ]
        return tuple(each.data_ptr() for each in tensors)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Moments of each parameter by name, and for torch's form its steps, sharing the optimizer's memory."""
        saved = ("exp_avg", "exp_avg_sq") if self._corrects_in_rate else ("exp_avg", "exp_avg_sq", "step")
        return {name: {key: own[key] for key in saved} for name, own in self._state.items()}
