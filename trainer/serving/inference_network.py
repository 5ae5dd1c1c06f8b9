"""Inference of a network: for few samples by its recorded operations, whose Python would take longer than they do.

Sizes: B samples, N dense features, K keys of the fields, P stored width, T tasks, S sequences.
"""

import copy
import functools
import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from cowrec.models.linear_relu import BY_ONE_DNN, LinearRelu

logger = logging.getLogger(__name__)

LookedUp: TypeAlias = Tensor | tuple[Tensor, Tensor]

_FEW_SAMPLES = 32
"""Most samples for which operations are replayed where oneDNN computes them faster: for more, it gains more than Python
costs."""
_TOLERANCE = 1e-4
"""Of probabilities, float32 of sums in another order."""


class InferenceNetwork:
    """Probabilities by a network: float32 [B], or [B, T] of T > 1 tasks, of dense features and looked-up rows.

    Args:
        network: as built; its weights stay as they are.
        logit_shift: added to the logits.
        sizes: N, K, P.
        lengths: largest length of each sequence, [S].
    """

    def __init__(
        self, network: nn.Module, logit_shift: float, sizes: tuple[int, int, int], lengths: Sequence[int] = ()
    ) -> None:
        self._computed = _Probabilities(network, logit_shift).eval().requires_grad_(False)
        self._weights = _weights(self._computed)
        with torch.inference_mode():
            self._replay = _recorded(self._computed, sizes, torch.tensor(lengths, dtype=torch.int64))

    @property
    def replays(self) -> bool:
        """Whether operations are replayed for few samples."""
        return self._replay is not None

    def with_weights(self, weights: Mapping[str, Tensor]) -> "InferenceNetwork":
        """The same network with the weights of another state dictionary. Raises RuntimeError unless they fit."""
        other = copy.copy(self)
        other._computed = copy.deepcopy(self._computed)
        other._computed.network.load_state_dict(weights)
        other._weights = _weights(other._computed)
        for module in other._computed.modules():
            if isinstance(module, LinearRelu):
                module.pack()
        return other

    def __call__(self, dense: Tensor, rows: LookedUp) -> Tensor:
        """Of dense features [B, N] and rows [B, K, P], with sequences as a pair with their lengths, int64 [B, S].

        It is faster in a thread that is in inference mode already.
        """
        if not torch.is_inference_mode_enabled():
            with torch.inference_mode():
                return self(dense, rows)
        found: Tensor = (
            self._replay(dense, rows, *self._weights)
            if self._replay and (dense.shape[0] <= _FEW_SAMPLES or torch.float32 not in BY_ONE_DNN)
            else self._computed(dense, rows)
        )
        return found


class _Probabilities(nn.Module):
    def __init__(self, network: nn.Module, logit_shift: float) -> None:
        super().__init__()
        self.network, self._shift = network, logit_shift

    def forward(self, dense: Tensor, rows: LookedUp) -> Tensor:
        logits: Tensor = self.network(dense, rows)
        return (logits + self._shift if self._shift else logits).sigmoid()


def _weights(computed: nn.Module) -> list[Tensor]:
    return list(computed.state_dict(keep_vars=True).values())


def _recorded(computed: nn.Module, sizes: tuple[int, int, int], lengths: Tensor) -> Any:
    """The operations for one sample, of dense features, rows and the weights in the order of the state dictionary.

    None if other samples or weights may need other operations, as in a network of one's own. The weights are arguments,
    so that all versions share one recording: TorchScript never frees one in which weights are constants.
    """
    num_dense, keys, width = sizes
    shell = copy.deepcopy(computed)
    holders = [_holder(shell, name) for name in computed.state_dict()]

    drawn = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))

    def inputs(samples: int) -> tuple[Any, ...]:
        weights = (
            0.2 * drawn(*weight.shape) if weight.is_floating_point() else weight for weight in _weights(computed)
        )
        rows = drawn(samples, keys, width)
        looked_up = (rows, torch.arange(samples)[:, None] % (lengths + 1)) if len(lengths) else rows
        return drawn(samples, num_dense), looked_up, *weights

    def compute(dense: Tensor, rows: LookedUp, *weights: Tensor) -> Any:
        for (holder, name), weight in zip(holders, weights, strict=True):
            holder[name] = weight  # torch.func.functional_call refuses to be traced
        return shell(dense, rows)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            replay: Any = torch.jit.trace(compute, inputs(1), check_trace=False)
            for given in map(inputs, (1, 3, _FEW_SAMPLES) * 2):  # the second time as the executor has optimised it
                torch.testing.assert_close(replay(*given), compute(*given), atol=_TOLERANCE, rtol=0, equal_nan=True)
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:
            logger.debug("the operations of the network are not recorded: %s", error)
            return None
    if any(issubclass(warning.category, torch.jit.TracerWarning) for warning in warned):
        return None  # a value is recorded as a constant
    return replay


def _holder(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The dictionary of parameters or buffers that has a weight, and the weight's name in it."""
    path, _, name = name.rpartition(".")
    owner = module.get_submodule(path)
    return (owner._parameters if name in owner._parameters else owner._buffers), name
