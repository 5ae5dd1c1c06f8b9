"""Dense optimizer: Adam whose learning rate is set before every step, in memory that a captured CUDA graph reads."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import inf, sqrt

import torch
from torch import Tensor, nn
from torch.optim import Adam

from cowrec.sparse_opt import Hyperparameters

_WARMUP_START = 1e-8


class DenseAdam(Adam):
    """torch's Adam with a learning rate that rises linearly from 1e-8 during the warm-up and then stays constant.

    Everything that changes from step to step is a tensor on the parameters' device. Epsilon is a number, hence
    constant: Keras' form, ``lr * sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps)``, is torch's form for infinitely
    many steps, whose corrections ``1 - b^t`` are 1, at a learning rate that contains both corrections.

    Args:
        parameters: parameters to update, by name; all on one device.
        hyperparameters: dense_lr, the learning rate after the warm-up, betas and eps.
        adam_epsilon: form of epsilon, Keras' or torch's.
        warmup_steps: steps of the warm-up; 0 for none.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        hyperparameters: Hyperparameters,
        adam_epsilon: str,
        warmup_steps: int,
    ) -> None:
        device, betas = next(iter(parameters.values())).device, hyperparameters.betas
        super().__init__(list(parameters.values()), lr=0.0, betas=betas, eps=hyperparameters.eps, fused=True)
        self._parameters = dict(parameters)
        self._betas, self._lr, self._warmup_steps = betas, hyperparameters.dense_lr, warmup_steps
        self._rate, self._rate_now = torch.zeros((), device=device), 0.0
        for group in self.param_groups:
            group["lr"] = self._rate
        self._corrects_in_rate = adam_epsilon == "keras"
        for parameter in self._parameters.values():
            steps = torch.full((), inf if self._corrects_in_rate else 0.0, device=device)
            moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            self.state[parameter] = {"step": steps, **moments}

    def prepare(self, step: int) -> float:
        """Sets the learning rate of step ``step``, counted from 0, on the device; returns it without corrections.

        Source: the CowClip reference's schedule, ``1e-8 + (lr - 1e-8) * min(k, W) / W``.
        """
        share = min(step, self._warmup_steps) / self._warmup_steps if self._warmup_steps else 1.0
        lr = _WARMUP_START + (self._lr - _WARMUP_START) * share if self._warmup_steps else self._lr
        rate = lr
        if self._corrects_in_rate:
            beta1, beta2 = self._betas
            rate *= sqrt(1 - beta2 ** (step + 1)) / (1 - beta1 ** (step + 1))
        if rate != self._rate_now:
            self._rate.fill_(rate)
            self._rate_now = rate
        return lr

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
            *self._parameters.values(),
            *(each for own in self.state.values() for each in own.values()),
        ]
        return tuple(each.data_ptr() for each in tensors)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Moments of each parameter by name, and for torch's form its steps, sharing the optimizer's memory."""
        saved = ("exp_avg", "exp_avg_sq") if self._corrects_in_rate else ("exp_avg", "exp_avg_sq", "step")
        return {name: {key: self.state[each][key] for key in saved} for name, each in self._parameters.items()}
