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
    The process ends with this one, even if this one is killed. Ctrl-C does not reach it: the first one here sends it
    SIGTERM and waits for the end of its call, the second one kills it.
    """

    def __init__(self) -> None:
        self._process: Any = None
        self._connection: Connection

    def __exit__(self, *error: object) -> None:
        self.close()

    def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Calls ``function(*arguments)``, a function of a module.

        Raises:
            ProcessFailed: the function raised an error, or the process was killed.
        """
        (result,) = self.each(function, *arguments)
        return cast("Result", result)

    def each(self, function: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
        """Yields what ``function(*arguments)``, a generator, yields, as soon as it does; raises as :meth:`call`."""
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
        """Ends the process, if there is one."""
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
        """Ends the process by closing its connection. Returns how it ended."""
        self._connection.close()
        if not kill:
            self._process.join(_SECONDS_TO_END)
        self._process.kill()
        self._process.join()
        code, self._process = self._process.exitcode or 0, None
        return f"by signal {-code}" if code < 0 else f"with exit code {code}"


def _context(module: str) -> ForkServerContext | SpawnContext:
    """How processes start: forked from a server that has imported the module, but has no other threads.

    Not with a GPU: importing FBGEMM asks the driver for it, after which no forked process can use it.
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
            for each in result if isinstance(result, Iterator) else [result]:
                connection.send(("", [each]))
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
