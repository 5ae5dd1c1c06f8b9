"""Checks of a network of the user's own: its class, and what it computes from a few samples."""

import inspect
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .front import LookedUpFront


def check_class(name: str, found: Any) -> type[nn.Module]:
    """Checks what ``model.name`` names and returns it.

    Raises:
        ValueError: it is no subclass of nn.Module, or cannot be made and called as a network is.
    """
    given = f'model.name = "{name}"'
    if not (inspect.isclass(found) and issubclass(found, nn.Module)):
        kind = f"the class {found.__name__}" if inspect.isclass(found) else f"of type {type(found).__name__}"
        raise ValueError(
            f"{given} is {kind}, not a subclass of torch.nn.Module; name a class such as docs/models.md has"
        )
    for method, call, owner in (("__init__", "(config, front)", found), ("forward", "(dense, sparse)", found)):
        function = getattr(owner, method)
        parameters = list(inspect.signature(function).parameters.values())[1:]
        taken = [each for each in parameters if each.kind in _TAKES_POSITION]
        any_number = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters)
        required = [each for each in taken if each.default is inspect.Parameter.empty]
        own = function not in (nn.Module.__init__, nn.Module.forward)
        too_many = method == "forward" and len(required) > 2
        if not own or too_many or not (any_number or len(taken) >= 2):
            has = f"{method}{inspect.signature(function)}" if own else f"no {method} of its own"
            raise ValueError(
                f"{given} has {has}, but is used as {method}{call}; define def {method}(self, {call[1:]}, as in"
                " docs/models.md"
            )
    return found


def check_network(
    name: str, build: Callable[[], nn.Module], front: LookedUpFront, num_fields: int, num_tasks: int
) -> None:
    """Makes a network and computes logits of three samples in training, and of one in evaluation.

    Raises:
        ValueError: it does not keep the front, fails, returns anything but a logit for each sample (and task), or its
            logits do not depend on the embeddings.
    """
    given = f'model.name = "{name}"'
    network = _tried(given, "making it", build)
    if not any(module is front for module in network.modules()):
        raise ValueError(f"{given} does not keep the front that it is given; write self.front = front in its __init__")
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise ValueError(f"{given} has no parameters to train beside the tables; add one, such as a bias of the logits")
    rows = torch.rand(3, num_fields, front.row_width, requires_grad=True)
    logits = _logits(given, network.train(), front, rows, num_tasks)
    if not logits.requires_grad or torch.autograd.grad(logits.sum(), rows, allow_unused=True)[0] is None:
        raise ValueError(
            f"{given} computes logits that do not depend on the embeddings, so that no table would be trained; compute"
            " them from self.front(dense, sparse), without detach()"
        )
    with torch.no_grad():
        _logits(given, network.eval(), front, rows[:1], num_tasks)


def _logits(given: str, network: nn.Module, front: LookedUpFront, rows: Tensor, num_tasks: int) -> Tensor:
    samples = len(rows)
    shape = [samples, num_tasks] if num_tasks > 1 else [samples]
    dense = torch.rand(samples, front.num_dense)
    what = f"its forward on {samples} sample{'s' if samples > 1 else ''}"
    logits = _tried(given, what, lambda: network(dense, rows))
    found = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if not isinstance(logits, Tensor) or list(logits.shape) != shape or logits.dtype != torch.float32:
        kind = f" of {logits.dtype}" if isinstance(logits, Tensor) and logits.dtype != torch.float32 else ""
        column = num_tasks == 1 and found == [samples, 1]
        remedy = "for a last dimension of one return logits.squeeze(1)" if column else "see docs/models.md"
        raise ValueError(
            f"{given}: {what} returned {found}{kind} instead of one logit for each"
            f" {'sample and task' if num_tasks > 1 else 'sample'}, float32 {shape}; {remedy}"
        )
    return logits


def _tried(given: str, what: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)
        own = [each for each in last if each.filename != __file__ and "/torch/" not in each.filename]
        where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
        raise ValueError(
            f"{given}: {what} failed{where}: {type(error).__name__}: {error}; in the check the ids are looked up"
            " already, so that sparse can only be passed to self.front"
        ) from error


_TAKES_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
