"""Work in a process of its own: its memory is its own, and where it fails the caller goes on."""

import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from .errors import ProcessFailed, is_message

Result = TypeVar("Result")


def run_in_subprocess(function: Callable[..., Result], *arguments: Any) -> Result:
    """``function(*arguments)``, a module's function, in a new process that ends with it, and with this one.

    Raises:
        ProcessFailed: it raised an error, or was ended.
    """
    # Forked from a server that has imported everything, started no thread and never touched the GPU.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        result, error = receiver.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        raise ProcessFailed(f"the process was ended {how}") from None
    except KeyboardInterrupt:
        process.kill()
        raise
    finally:
        process.join()
    if error is not None:
        raise ProcessFailed(error)
    return result


def _run(outcome: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        outcome.send((function(*arguments), None))
    except Exception as error:
        if not is_message(error):
            traceback.print_exc()
        outcome.send((None, f"{type(error).__name__}: {error}"))


def _end_with_parent() -> None:
    """A parent that was killed is not to leave this process behind."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
