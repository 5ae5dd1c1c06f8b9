"""Errors written for users, which end in one line instead of a traceback."""

import os
import sys

from cowrec.errors import UserError
from cowrec.files import NO_SPACE, space_remedy


class RunError(Exception):
    """The end of a run for a reason that the message explains to the user."""


class Interrupted(Exception):
    """Ctrl-C or SIGTERM, after a checkpoint was saved; the message names it."""


class NonFiniteLoss(RunError):
    """The loss became NaN or infinite; the message names the step and the last good checkpoint."""


class ProcessFailed(RunError):
    """A subprocess ended without a result; the message is its error, or how it ended."""


def is_message(error: BaseException) -> bool:
    """Tells whether the text of an error is enough for a user; any other error is a bug and keeps its traceback."""
    return isinstance(error, UserError | RunError | OSError | ModuleNotFoundError) or _is_out_of_memory(error)


def message_of(error: BaseException) -> str:
    """Returns the text for the user of an error that :func:`is_message`; a full disk or GPU gets the remedy."""
    if isinstance(error, OSError) and error.errno in NO_SPACE and error.strerror == os.strerror(error.errno):
        place = error.filename2 or error.filename
        return (
            f"{error.strerror}{f' for {place}' if place else ''}; {space_remedy(error)}, then run the command"
            " again, with --resume if it is to continue a run"
        )
    if _is_out_of_memory(error):
        return (
            f"{str(error).partition('. ')[0]}; lower train.batch_size or raise train.accumulation, set data.resident ="
            ' "no", or train on more GPUs'
        )
    return str(error)


def _is_out_of_memory(error: BaseException) -> bool:
    torch = sys.modules.get("torch")  # which --help does without
    return torch is not None and isinstance(error, torch.OutOfMemoryError)
