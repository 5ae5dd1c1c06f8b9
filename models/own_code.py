"""Code of the user's own, which a configuration names as "module:name": importing it, and trying a network of it."""

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from cowrec.errors import UserError
from cowrec.names import nearest_name

from .front import LookedUpFront


def is_import_path(name: str) -> bool:
    """True for "module:name", false for the name of something built in."""
    return ":" in name


def search_also(*folders: Path) -> None:
    sys.path += [path for path in dict.fromkeys(str(folder.absolute()) for folder in folders) if path not in sys.path]


def chosen(key: str, name: str, known: Mapping[str, Any], own: str) -> Any:
    """What ``key = "name"`` of a configuration means: one of ``known``, or the user's own; see :func:`imported`.

    ``own`` tells how one's own is written, for the ValueError that an unknown name raises.
    """
    if is_import_path(name):
        return imported(key, name)
    if name not in known:
        nearest = nearest_name(name, known)
        hint = f'did you mean "{nearest}"? ' if nearest else ""
        raise UserError(f'{key} is "{name}"; {hint}known: {", ".join(known)}; {own}')
    return known[name]


def imported(key: str, name: str) -> Any:
    """Imports the object that ``key = "module:name"`` of a configuration means.

    Raises:
        ValueError: not of this form, no such module or name in it, an error while it is imported, or a file that has
            changed since then.
    """
    module_name, _, attribute = name.partition(":")
    given = f'{key} = "{name}"'
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)) or module_name.endswith(".py"):
        raise UserError(
            f'{given} must be "MODULE:NAME" with the dotted name of a Python module, without .py, and a name in it, for'
            ' example "my_module:Net"; a folder is given by PYTHONPATH'
        )
    if module_name == "__main__":
        raise UserError(f"{given}: later commands cannot import __main__; put {attribute} into a file")
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(
                f"{given}: there is no module {error.name} in Python's path, the folder of the TOML file or the current"
                f" folder {Path.cwd()}; add the folder that has {module_name.replace('.', '/')}.py to PYTHONPATH"
            ) from None
        raise UserError(f"{given}: importing it failed{_place(error)}: {type(error).__name__}: {error}") from error
    file = file_of(module)
    if file and file.is_file() and _SOURCES.setdefault(module, file.read_bytes()) != file.read_bytes():
        raise UserError(f"{given}: {file} has changed since this process imported it; restart Python")
    if not hasattr(module, attribute):
        nearest = nearest_name(attribute, (name for name in vars(module) if not name.startswith("_")))
        hint = f"did you mean {nearest}?" if nearest else f"add {attribute} to it, or name another module"
        raise UserError(f"{given}: {file or module_name} has no {attribute}; {hint}")
    return getattr(module, attribute)


_SOURCES: dict[ModuleType, bytes] = {}
"""Contents of the file of each module when it was first used."""


def file_of(module: ModuleType) -> Path | None:
    """The file that a module was imported from; None if it is built into Python, or made in memory."""
    file = getattr(module, "__file__", None)
    return Path(file).absolute() if file else None


def require_beside(key: str, name: str, folder: Path) -> None:
    """Raises ValueError if ``module:name``, once imported, is another file than the one in ``folder``."""
    module = name.partition(":")[0]
    beside, file = folder.absolute() / f"{module.replace('.', '/')}.py", file_of(sys.modules[module])
    if file and beside.is_file() and not beside.samefile(file):
        raise UserError(
            f'{key} = "{name}": {file} is imported, but {beside} exists too; rename one of them, or, if both are'
            " used by one Python process, use two"
        )


def check_network(name: str, build: Callable[[], Any], front: LookedUpFront, num_tasks: int) -> None:
    """Makes a network and computes logits of three samples in training, and of one in evaluation.

    Raises:
        ValueError: it does not keep the front, fails, returns anything but a logit for each sample (and task), or its
            logits do not depend on the embeddings, or are not finite for a sample without a history.
    """
    given = f'model.name = "{name}"'
    hint = "in the check the ids are looked up already, so that sparse can only be passed to self.front"
    network = tried(given, "making it with (config, front)", build, hint)
    if not any(module is front for module in network.modules()):
        raise UserError(f"{given} does not keep the front that it is given; write self.front = front in its __init__")
    rows = torch.rand(3, front.num_keys, front.row_width, requires_grad=True)
    longest = torch.tensor([len(sequence.keys) for sequence in front.sequences.values()], dtype=torch.int64)
    lengths = torch.stack([longest, longest * 0, longest.clamp(max=1)])

    def forward(training: bool, *inputs: Any) -> Tensor:
        logits: Tensor = network.train(training)(*inputs)
        return logits

    for samples in (3, 1):
        what = f"its forward(dense, sparse) on {samples} sample{'s' if samples > 1 else ''}"
        dense, some = torch.rand(samples, front.num_dense), rows[:samples]
        looked_up = (some, lengths[:samples]) if front.sequences else some
        logits = tried(given, what, partial(forward, samples > 1, dense, looked_up), hint)
        shape = [samples, num_tasks] if num_tasks > 1 else [samples]
        found = f"{list(logits.shape)} of {logits.dtype}" if isinstance(logits, Tensor) else type(logits).__name__
        if found != f"{shape} of torch.float32":
            remedy = "for a last dimension of one return logits.squeeze(1)" if "1]" in found else "see docs/models.md"
            raise UserError(
                f"{given}: {what} returned {found} instead of one logit for each"
                f" {'sample and task' if num_tasks > 1 else 'sample'}, float32 {shape}; {remedy}"
            )
        trained = [rows, *(parameter for parameter in network.parameters() if parameter.requires_grad)]
        used = logits.requires_grad and torch.autograd.grad(logits.sum(), trained, allow_unused=True)
        if not used or used[0] is None:
            raise UserError(
                f"{given} computes logits that do not depend on the embeddings, so that no table would be trained;"
                " compute them from self.front(dense, sparse), without detach()"
            )
        if front.sequences and not all(values.isfinite().all() for values in (logits, *used) if values is not None):
            raise UserError(
                f"{given}: {what} returned logits or gradients that are not finite for a sample without a history, as"
                " requests and the padding of torchrun have; mask with -1e9 instead of -inf, and multiply by the mask"
            )


def tried(given: str, what: str, function: Callable[[], Any], hint: str) -> Any:
    """Calls a function of the user's. Raises ValueError, with the place in the user's file, if it fails."""
    try:
        return function()
    except Exception as error:
        raise UserError(f"{given}: {what} failed{_place(error)}: {type(error).__name__}: {error}; {hint}") from error


def _place(error: Exception) -> str:
    """`` (FILE:LINE)`` of the innermost frame of an error in the user's code."""
    others = (__file__, inspect.getfile(importlib), "<frozen", "/torch/")
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not any(map(frame.filename.count, others))
    ]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
