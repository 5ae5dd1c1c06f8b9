"""Dense optimizer: Adam whose learning rate is set before every step, in memory that a captured CUDA graph reads."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import inf, log, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam

from cowrec.sparse_opt import Hyperparameters
from cowrec.sparse_opt.algorithm.adam import BetaHistory


class DenseAdam(Adam):
    """torch's Adam, with decoupled weight decay its AdamW, with a learning rate that is set before every step.

    Everything that changes from step to step is a tensor on the parameters' device. Epsilon is a number, hence
    constant: Keras' form, ``lr * sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps)``, is torch's form for infinitely
    many steps, whose corrections ``1 - b^t`` are 1, at a learning rate that contains both corrections. In torch's form
    after a change of the betas, t is a number of steps at which the second correction is right, and the learning rate
    contains what the first one then lacks.

    Args:
        hyperparameters: betas, eps and weight decay of the first steps.
        admits: called once the gradients of a step are complete; False leaves the step out. By default all are taken.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        hyperparameters: Hyperparameters,
        adam_epsilon: str,
        admits: Callable[[], bool] | None = None,
    ) -> None:
        device, betas = next(iter(parameters.values())).device, hyperparameters.betas
        super().__init__(list(parameters.values()), lr=0.0, betas=betas, eps=hyperparameters.eps, fused=True)
        self._parameters = dict(parameters)
        self._betas, self._counted = BetaHistory(betas), 0.0
        self._rate, self._rate_now = torch.zeros((), device=device), 0.0
        for group in self.param_groups:
            group["lr"] = self._rate
        self._weight_decay, self._kept = hyperparameters.dense_weight_decay, torch.ones((), device=device)
        self._passes, self._passes_taken = 1, 0
        self._admits = admits or (lambda: True)
        self._corrects_in_rate = adam_epsilon == "keras"
        for parameter in self._parameters.values():
            steps = torch.full((), inf if self._corrects_in_rate else 0.0, device=device)
            moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            self.state[parameter] = {"step": steps, **moments}
        if device.type == "cpu":  # after torch has wrapped the class's method
            self.step = self._step_on_cpu  # type: ignore[method-assign]

    def prepare(self, step: int, lr: float) -> None:
        """Sets the learning rate of step ``step``, counted from 0, on the device."""
        rate = lr
        if self._corrects_in_rate:
            first, second = self._betas.products(step + 1)
            rate *= sqrt(1 - second) / (1 - first)
        elif self._betas.since:
            first, _ = self._betas.products(step + 1)
            rate *= (1 - self._betas.betas[0] ** (self._counted + step + 1 - self._betas.since)) / (1 - first)
        if rate != self._rate_now:
            self._rate.fill_(rate)
            self._rate_now = rate
        if self._weight_decay:
            self._kept.fill_(1 - lr * self._weight_decay)

    def reconfigure(self, hyperparameters: Hyperparameters, after: int) -> None:
        """Changes betas, eps and weight decay of the steps after step ``after``; the bias corrections follow the betas
        of all steps.

        Before saved tensors are loaded, repeat the calls of the steps to load.
        """
        self._betas = self._betas.changed(hyperparameters.betas, after)
        self._weight_decay = hyperparameters.dense_weight_decay
        for group in self.param_groups:
            group["betas"], group["eps"] = hyperparameters.betas, hyperparameters.eps
        if not self._corrects_in_rate:
            self._counted = _steps_until(self._betas.earlier[1], hyperparameters.betas[1])
            for own in self.state.values():
                own["step"].fill_(self._counted)

    def accumulate(self, passes: int) -> None:
        """Makes one step of every ``passes`` calls of :meth:`step`, whose gradients add up."""
        assert not self._passes_taken
        self._passes = passes

    def _completes_step(self) -> bool:
        """Counts a pass; true if it is the last one of its step."""
        self._passes_taken = (self._passes_taken + 1) % self._passes
        return not self._passes_taken

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, without torch's grouping by device; or sets them to zero, as torch does.

        Has no effect between the passes of a step.
        """
        if self._passes_taken:
            return
        if not set_to_none:
            super().zero_grad(set_to_none)
            return
        for parameter in self._parameters.values():
            parameter.grad = None

    def step(self, closure: Any = None) -> Any:
        """Takes a step; ``closure`` must be None."""
        assert closure is None
        if not self._completes_step() or not self._admits():
            return None
        self._decay_weights()
        return super().step()

    def _decay_weights(self) -> None:
        """Decays the weights beside the coming step, as torch's AdamW. Its rate here may contain bias corrections."""
        if self._weight_decay:
            trained: list[Tensor] = [each for each in self._parameters.values() if each.grad is not None]
            with torch.no_grad():
                torch._foreach_mul_(trained, self._kept)

    def _step_on_cpu(self, closure: Any = None) -> None:
        """Does what torch's method does, for parameters that all have gradients, in a fifth of its host time."""
        grads = [each.grad for each in self._parameters.values() if each.grad is not None]
        assert closure is None
        if not self._completes_step() or not self._admits():
            return
        self._decay_weights()
        if len(grads) < len(self._parameters):
            super().step()
            return
        own = [self.state[each] for each in self._parameters.values()]
        steps, (beta1, beta2) = [each["step"] for each in own], self._betas.betas
        with torch.no_grad():
            if not self._corrects_in_rate:
                torch._foreach_add_(steps, 1)
            torch._fused_adam_(
                list(self._parameters.values()),
                grads,
                [each["exp_avg"] for each in own],
                [each["exp_avg_sq"] for each in own],
                [],
                steps,
                lr=self._rate,
                beta1=beta1,
                beta2=beta2,
                weight_decay=0.0,
                eps=self.param_groups[0]["eps"],
                amsgrad=False,
                maximize=False,
            )

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Allows :meth:`step` in the capture of a CUDA graph, which torch refuses by default."""
        for group in self.param_groups:
            group["capturable"] = True
        try:
            yield
        finally:
            for group in self.param_groups:
                group["capturable"] = False

    def addresses(self) -> tuple[int, ...]:
        """Addresses of the tensors that a captured CUDA graph of a step reads and writes."""
        tensors = [
            self._rate,
            self._kept,
            *self._parameters.values(),
            *(each for own in self.state.values() for each in own.values()),
        ]
        return tuple(each.data_ptr() for each in tensors)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Moments of each parameter by name, and for torch's form its steps, sharing the optimizer's memory."""
        saved = ("exp_avg", "exp_avg_sq") if self._corrects_in_rate else ("exp_avg", "exp_avg_sq", "step")
        return {name: {key: self.state[each][key] for key in saved} for name, each in self._parameters.items()}


def _steps_until(product: float, beta: float) -> float:
    """Number of steps, whole or not, whose betas have a product: ``beta^steps = product``."""
    if product == 1:
        return 0.0
    return log(product) / log(beta) if product and beta else inf
