"""Errors written for users, which end in one line instead of a traceback."""

import traceback


class RunError(Exception):
    """A run ended for a reason that its message explains to the user."""


class Interrupted(Exception):
    """Ctrl-C or SIGTERM, after a checkpoint was saved; the message names it."""


class NonFiniteLoss(RunError):
    """The loss became NaN or infinite; the message says where and what is left."""


class ProcessLost(RunError):
    """Another process of the run hangs or has ended."""


class ProcessFailed(RunError):
    """A subprocess ended without a result; the message is its error, or how it was ended."""


def is_message(error: BaseException) -> bool:
    """True for an error whose text is enough for a user; any other is a bug and keeps its traceback.

    These are run errors, the system's errors about files and sockets, and ``ValueError`` and ``ImportError`` that
    cowrec itself raised. The same types raised inside a library say nothing about what the user wrote.
    """
    if isinstance(error, RunError | OSError):
        return True
    frames = list(traceback.walk_tb(error.__traceback__))
    raised_here = bool(frames) and frames[-1][0].f_globals["__name__"].startswith("cowrec.")
    return raised_here and isinstance(error, ValueError | ImportError)
