"""Processes of the command ``cowrec`` for tests, forked from one that has imported the libraries."""

import atexit
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import IO, Any

import psutil
import torch
import torch.multiprocessing

from process_groups import prepared_method
from trainer_cases import ENVIRONMENT


class Forked:
    """A running ``cowrec ARGUMENTS`` with the parts of `subprocess.Popen` that tests use; both outputs are pipes.

    It is a process of its own like ``python -m cowrec.trainer``, but spends no time on imports. Where several processes
    are asked for, it is torchrun, which forks them and restarts them so many times.
    """

    def __init__(
        self, *arguments: object, processes: int = 1, restarts: int = 0, env: Mapping[str, str] = ENVIRONMENT
    ) -> None:
        context: Any = multiprocessing.get_context(prepared_method())
        outputs = [context.Pipe(duplex=False) for _ in range(2)]
        writers = [writer for _, writer in outputs]
        launcher = ["--standalone", "--nproc-per-node", processes, "--max-restarts", restarts]
        launcher += ["--run-path", "--start-method", "fork", __file__]
        command = [*(launcher if processes > 1 else []), *arguments]
        self._process = context.Process(
            target=_run, args=([str(word) for word in command], processes > 1, os.getcwd(), dict(env), writers)
        )
        self._process.start()
        atexit.register(self.kill)  # Python waits for it at its end
        for writer in writers:
            writer.close()
        self.stdout, self.stderr = (_text(reader) for reader, _ in outputs)
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        """The exit code, negative if a signal has ended it; None while it runs."""
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("cowrec", timeout or 0.0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What nobody has read of both outputs, once it and its children have ended."""
        read = ["", ""]

        def collect(number: int, file: IO[str]) -> None:
            with file:
                read[number] = file.read()

        outputs = enumerate((self.stdout, self.stderr))
        threads = [threading.Thread(target=collect, args=output, daemon=True) for output in outputs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
            if thread.is_alive():
                raise subprocess.TimeoutExpired("cowrec", timeout or 0.0)
        self.wait(timeout)
        return read[0], read[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def ranks(self) -> list[psutil.Process]:
        """The processes that train under torchrun, by rank."""
        parents = sorted(psutil.Process(self.pid).children(), key=lambda child: child.pid)
        return [rank for parent in parents for rank in parent.children()]

    def kill_all(self) -> None:
        """Kills it and its children."""
        if self.poll() is None:
            process = psutil.Process(self.pid)
            for module in [*process.children(recursive=True), process]:
                module.kill()


def run_forked(*arguments: object, env: Mapping[str, str] = ENVIRONMENT) -> subprocess.CompletedProcess[str]:
    """Runs ``cowrec ARGUMENTS`` to its end."""
    process = Forked(*arguments, env=env)
    output, errors = process.communicate()
    return subprocess.CompletedProcess(arguments, process.wait(), output, errors)


def _text(reader: Connection) -> IO[str]:
    with reader:
        return os.fdopen(os.dup(reader.fileno()))


def _run(
    arguments: Sequence[str], launches: bool, folder: str, env: Mapping[str, str], outputs: Sequence[Connection]
) -> None:
    for number, output in enumerate(outputs, 1):
        os.dup2(output.fileno(), number)
        output.close()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    gc.freeze()  # imported modules, through which a search takes longer than most tests
    torch.set_num_threads(1)
    if launches:
        from torch.distributed.run import main as torchrun

        torchrun(list(arguments))
    else:
        _cowrec(arguments)


def _cowrec(arguments: Sequence[str]) -> None:
    from cowrec.trainer.__main__ import main

    sys.argv = ["cowrec", *arguments]
    main()


def _rank(arguments: Sequence[str]) -> None:
    """Runs a rank in a child, since torchrun waits forever for a process of its own that leaves by `os._exit`."""
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    rank = os.fork()
    if not rank:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGTERM)  # as torchrun's own
        _cowrec(arguments)
    for received in signals:
        signal.signal(received, lambda number, _: os.kill(rank, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    if code:
        os._exit(abs(code))


if __name__ == "__main__":  # in a process of torchrun
    _rank(sys.argv[1:])
