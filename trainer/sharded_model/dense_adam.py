"""Dense optimizer: Adam whose learning rate and epsilon are set before every step."""

from collections.abc import Mapping
from math import sqrt

import torch
from torch import Tensor, nn
from torch.optim import Adam

from cowrec.trainer.config.sections import OptimizerConfig

_WARMUP_START = 1e-8


class DenseAdam(Adam):
    """torch's Adam with a learning rate that rises linearly from 1e-8 during the warm-up and then stays constant.

    Args:
        parameters: parameters to update, by name.
        config: betas, eps and the form of epsilon, Keras' or torch's.
        lr: learning rate after the warm-up.
        warmup_steps: steps of the warm-up; 0 for none.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, lr: float, warmup_steps: int):
        super().__init__(list(parameters.values()), lr=lr, betas=config.betas, eps=config.eps, fused=True)
        self._parameters = dict(parameters)
        self._config, self._lr, self._warmup_steps = config, lr, warmup_steps

    def prepare(self, step: int) -> float:
        """Sets learning rate and eps of step ``step``, counted from 0; returns the learning rate.

        Source: the CowClip reference's schedule, ``1e-8 + (lr - 1e-8) * min(k, W) / W``. Keras' epsilon is torch's at
        ``eps / sqrt(1 - b2^t)``: both divide by ``sqrt(v / (1 - b2^t)) + eps'``.
        """
        share = min(step, self._warmup_steps) / self._warmup_steps if self._warmup_steps else 1.0
        lr = _WARMUP_START + (self._lr - _WARMUP_START) * share if self._warmup_steps else self._lr
        eps = self._config.eps
        if self._config.adam_epsilon == "keras":
            eps /= sqrt(1 - self._config.betas[1] ** (step + 1))
        for group in self.param_groups:
            group["lr"], group["eps"] = lr, eps
        return lr

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Steps taken, scalar float32, and moments of each parameter by name, sharing the optimizer's memory."""
        for parameter in self._parameters.values():
            if not self.state[parameter]:  # as torch creates it in the first step
                zeros = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                self.state[parameter] = {"step": torch.zeros((), device=parameter.device), **zeros}
        return {name: dict(self.state[parameter]) for name, parameter in self._parameters.items()}
