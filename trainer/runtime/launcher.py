"""The process that launched this one, as torchrun launches the processes of a run."""

import logging
import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


@contextmanager
def ending_with_launcher() -> Iterator[None]:
    """In the block, SIGTERM is sent to this process once the one that launched it has ended, even by a kill.

    A run whose torchrun was killed would otherwise go on unattended, and keep its folder from the run that replaces it.
    Linux only; does nothing elsewhere.
    """
    try:
        launcher = os.pidfd_open(os.getppid())
    except (AttributeError, OSError):  # not Linux, or the launcher is outside this container
        yield
        return
    done, stop = os.pipe()

    def watch() -> None:
        if launcher in select.select([launcher, done], [], [])[0]:
            logger.warning("the process that launched this one has ended; stopping")
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=watch, name="cowrec-launcher", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(stop)  # ends the thread
        thread.join()
        os.close(done)
        os.close(launcher)
