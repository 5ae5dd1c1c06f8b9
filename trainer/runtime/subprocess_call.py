"""Function calls in a subprocess, which has its own peak memory and whose failure the caller survives."""

import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any, TypeVar, cast

import torch

from .errors import ProcessFailed, is_message

Result = TypeVar("Result")
_SECONDS_TO_END = 30


class Subprocess(AbstractContextManager["Subprocess"]):
    """A subprocess that runs one call after the other, without a new start and new imports for each.

    A call that fails also ends the process, whose memory or GPU may be in any state; the next call starts a new one.
    The process ends with its parent, even if the parent is killed. Ctrl-C does not reach it: a first one makes the
    parent send SIGTERM and wait for the end of the call, a second one kills the process.
    """

    def __init__(self) -> None:
        self._process: Any = None
        self._connection: Connection

    def __exit__(self, *error: object) -> None:
        self.close()

    def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Calls ``function(*arguments)``, a function of a module. Raises ProcessFailed if it failed or was killed."""
        (result,) = self.each(function, *arguments)
        return cast("Result", result)

    def each(self, function: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
        """Yields the values of the generator ``function(*arguments)`` as they come; raises as :meth:`call` does."""
        if self._process is None:
            self._start(function.__module__)
        try:
            self._connection.send((function, arguments))
            while True:
                error, results = self._connection.recv()
                if results is None:
                    break
                yield from results
        except (EOFError, ConnectionError):
            raise ProcessFailed(f"the process ended {self._end()}") from None
        except KeyboardInterrupt:
            self._ask_to_end()
            raise
        except BaseException:
            self._end(kill=True)
            raise
        if error:
            self._end()
            raise ProcessFailed(error)

    def close(self) -> None:
        if self._process is not None:
            self._end()

    def _start(self, module: str) -> None:
        context = _context(module)
        connection, other = context.Pipe()
        process = context.Process(target=_serve, args=(other,))
        # All of its threads inherit that a terminal's Ctrl-C, which is sent to this process too, does not reach it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        other.close()
        self._connection, self._process = connection, process

    def _ask_to_end(self) -> None:
        self._process.terminate()
        try:
            with suppress(EOFError, ConnectionError):
                while self._connection.recv()[1] is not None:
                    pass
        finally:
            self._end(kill=True)

    def _end(self, kill: bool = False) -> str:
        """Ends the process by closing its connection; returns how it ended."""
        self._connection.close()
        if not kill:
            self._process.join(_SECONDS_TO_END)
        self._process.kill()
        self._process.join()
        code, self._process = self._process.exitcode or 0, None
        return f"by signal {-code}" if code < 0 else f"with exit code {code}"


def _context(module: str) -> ForkServerContext | SpawnContext:
    """Returns how processes start: forked from a server that has imported the module, and that has no other threads.

    Not with a GPU: importing FBGEMM initializes its driver, which no forked process can use then.
    """
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    return context


def _serve(connection: Connection) -> None:
    """Runs calls until the other side closes the connection or one fails."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the fork server may have started before
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            call = connection.recv_bytes()
        except EOFError:
            return
        try:
            function, arguments = pickle.loads(call)
            result = function(*arguments)
            for value in result if isinstance(result, Iterator) else [result]:
                connection.send(("", [value]))
            connection.send(("", None))
        except Exception as error:
            if not is_message(error):
                traceback.print_exc()
            connection.send((f"{type(error).__name__}: {error}", None))
            return


def _end_with_parent() -> None:
    """Ends this process when its parent ends, even if the parent is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
