"""Questions of readers to those of the other processes, which answer them in a thread, over a gloo group of their own.

Who asks waits for its own answers only, so that processes need not ask at the same time or equally often.
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cowrec.data_pipeline.reading.exchange import Answering

from .processes import Process

logger = logging.getLogger(__name__)

_QUESTION, _ANSWER = 1, 2
"""Tags of messages."""
_NUMBERS = 4
"""In a question: whom it is for, and three numbers. A negative first number ends the thread."""
_HEADER, _PREFIX = 2048, 16
"""Bytes of the message before an answer, and of its two numbers: the size of the answer or of the text of an error,
and the kind of the error."""
_ERRORS: tuple[type[Exception], ...] = (ValueError, OSError, RuntimeError)
_EVER = timedelta(days=3650)


class GlooExchange:
    """Exchange between the readers of a run. All processes make and close it together.

    Args:
        process: this process, one of several; its timeout bounds the wait for answers.
    """

    def __init__(self, process: Process) -> None:
        self._rank, self._world_size, self._timeout = process.rank, process.world_size, process.timeout
        # The next question may be long in coming, and gloo closes its connections after a timeout.
        self._group: Any = dist.new_group(backend="gloo", timeout=_EVER)
        self._answering: list[Answering] = []
        self._asking = threading.Lock()
        self._sent: dict[int, Any] = {}
        self._thread = threading.Thread(target=self._serve, name="cowrec-answers", daemon=True)
        self._thread.start()

    def serve(self, answering: Answering) -> int:
        """Registers who answers; returns its number, which is that of its counterparts in the other processes.

        All processes register together, so that no question comes before its answerer.

        Raises:
            RuntimeError: a process has ended, or does not register within the timeout.
        """
        self._answering.append(answering)
        _wait(dist.barrier(self._group, async_op=True), self._timeout)
        return len(self._answering) - 1

    def ask(self, number: int, question: Sequence[int], ranks: Sequence[int]) -> list[Tensor]:
        """Asks ranks, other than this one, three numbers; returns their answers, uint8 [n], in the order of `ranks`.

        Raises:
            ValueError, OSError: the error that a rank had.
            RuntimeError: a rank has ended, or does not answer within the timeout.
        """
        deadline = time.monotonic() + self._timeout.total_seconds()
        answers, failures = list[Tensor](), list[Exception]()
        with self._asking:
            coming = [_Coming(rank, self._group, torch.tensor([number, *question])) for rank in ranks]
            for each in coming:  # after an error too, so that no answer is left that a later question would take
                try:
                    answers.append(each.answer(deadline))
                except _ERRORS as error:
                    failures.append(error)
        for failure in sorted(failures, key=lambda each: isinstance(each, RuntimeError)):
            raise failure
        return answers

    def close(self) -> None:
        """Ends the thread; no process asks any more.

        Raises:
            RuntimeError: a process has ended, or does not close its exchange within the timeout.
        """
        _wait(dist.barrier(self._group, async_op=True), self._timeout)
        end, following = torch.full((_NUMBERS,), -1), (self._rank + 1) % self._world_size
        _wait(dist.isend(end, following, self._group, _QUESTION), self._timeout)
        self._thread.join(self._timeout.total_seconds())

    def _serve(self) -> None:
        question = torch.empty(_NUMBERS, dtype=torch.int64)
        while True:
            try:
                rank = dist.recv(question, None, self._group, _QUESTION)
            except RuntimeError:  # the run ends
                return
            number, *numbers = question.tolist()
            if number < 0:
                return
            with suppress(RuntimeError):  # the process that asked has ended
                self._answer(rank, number, numbers)

    def _answer(self, rank: int, number: int, question: list[int]) -> None:
        """Sends a header, which the other process awaits already, then the answer, without a wait: the other process
        may receive those of others first."""
        answering = self._answering[number]
        answer, kind, text = torch.empty(0, dtype=torch.uint8), -1, b""
        try:
            answer = answering.answer(rank, question)
        except Exception as error:  # raised by the process that asked
            kind = next((kind for kind, each in enumerate(_ERRORS) if isinstance(error, each)), len(_ERRORS) - 1)
            text = str(error).encode()[: _HEADER - _PREFIX]
        header = torch.zeros(_HEADER, dtype=torch.uint8)
        header[:_PREFIX].view(torch.int64).copy_(torch.tensor([len(text) or len(answer), kind]))
        header[_PREFIX : _PREFIX + len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        _wait(dist.isend(header, rank, self._group, _ANSWER), self._timeout)
        self._sent[rank] = answer, dist.isend(answer, rank, self._group, _ANSWER) if len(answer) else None
        answering.answered(rank, question)


class _Coming:
    """An answer that a process was asked for."""

    def __init__(self, rank: int, group: Any, question: Tensor) -> None:
        self._rank, self._group, self._question = rank, group, question
        self._header = torch.empty(_HEADER, dtype=torch.uint8)
        self._error: RuntimeError | None = None
        try:
            self._received = dist.irecv(self._header, rank, group, _ANSWER)
            self._asked = dist.isend(question, rank, group, _QUESTION)
        except RuntimeError as error:
            self._error = error

    def answer(self, deadline: float) -> Tensor:
        """Waits for the answer. Raises the error that the process had, or RuntimeError if none comes."""
        try:
            if self._error:
                raise self._error
            _wait(self._received, _until(deadline))
            size, kind = self._header[:_PREFIX].view(torch.int64).tolist()
            if kind < 0:
                answer = torch.empty(size, dtype=torch.uint8)
                if size:
                    _wait(dist.irecv(answer, self._rank, self._group, _ANSWER), _until(deadline))
                return answer
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0]
            raise RuntimeError(f"rank {self._rank} did not send its samples: {first_line}") from error
        text = bytes(self._header[_PREFIX : _PREFIX + size].tolist()).decode(errors="replace")
        raise _ERRORS[kind](text)


def _wait(work: Any, timeout: timedelta) -> None:
    work.wait(timeout)


def _until(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))


@contextmanager
def exchange_between(process: Process) -> Iterator[GlooExchange | None]:
    """Opens the exchange of a run for the block; None for a process alone.

    After an error it is left to the end of the process, since the others may not come to close theirs.

    Raises:
        RuntimeError: a process does not come to open it.
    """
    if process.world_size == 1:
        yield None
        return
    dist.barrier()  # bounded by the run's timeout, as making a group whose own timeout is this long is not
    exchange = GlooExchange(process)
    yield exchange
    try:
        exchange.close()
    except RuntimeError as error:  # what the processes did together is done
        logger.warning("the processes did not close their exchange: %s", str(error).partition("\n")[0])
