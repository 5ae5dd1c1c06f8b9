"""Function calls in a subprocess, which has its own peak memory and whose failure the caller survives."""

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
    """Calls ``function(*arguments)``, a function of a module, in a subprocess that ends with the call or this process.

    Raises:
        ProcessFailed: the function raised an error, or the subprocess was killed.
    """
    # Forked from a server that has imported the module, but has no other threads and has not used the GPU.
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
        raise ProcessFailed(f"the process ended {how}") from None
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
    """Ends this process when its parent ends, even if the parent is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
