"""The server's end of a shadow: answered requests are sent to its process, or dropped."""

import logging
import multiprocessing
import shutil
import socket
import tempfile
import threading
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import orjson
from prometheus_client import Counter

from cowrec.trainer.runtime.service_log import log_of

from ..request_samples import parts_of
from ..service import Result
from .config import ShadowConfig
from .process import run

logger = logging.getLogger(__name__)

_QUEUE_BYTES = 4 << 20
"""Asked for; the system may allow less (net.core.wmem_max)."""
_SILENT_SECONDS = 10.0
"""Time without metrics after which the shadow counts as ended."""
_RUNNING = b"""# HELP cowrec_shadow_running 1 if the shadow predicts.
# TYPE cowrec_shadow_running gauge
cowrec_shadow_running"""
_MESSAGE_BYTES = 48 << 10
"""Body of a message; requests with larger ones are sent in parts."""


class Shadow:
    """Sends answered requests to the shadow's process, which ends with this one; nothing here waits.

    The queue is a socket's, so that any number of processes forked from this one may send.

    Args:
        config: see :class:`ShadowConfig`.
        dropped: counts requests that were not sent, by reason.
    """

    def __init__(self, config: ShadowConfig, dropped: Counter) -> None:
        self._share, self._dropped = round(config.share * (1 << 32)), dropped
        self._folder = Path(tempfile.mkdtemp(prefix="cowrec-shadow-"))
        self._metrics = self._folder / "metrics"
        self._socket, receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _QUEUE_BYTES)
        self._socket.setblocking(False)
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(
            target=run, args=(config, receiver, self._metrics, log_of("shadow")), name="cowrec-shadow", daemon=True
        )
        self._process.start()
        receiver.close()
        self._closing = False
        threading.Thread(target=self._watch, name="cowrec-shadow", daemon=True).start()

    def offer(self, body: bytes, results: Sequence[Result], version: int) -> None:
        """Sends a request that was answered, unless it is not among the share or the queue is full.

        Args:
            body: of the request.
            results: of its samples.
            version: that they are of.
        """
        if zlib.crc32(body) >= self._share:
            return
        try:
            for part, values in _parts(body, results):
                self._socket.send(b"%b\n%b" % (orjson.dumps([version, values]), part))
        except BlockingIOError:
            self._dropped.labels("queue").inc()
        except OSError as error:
            self._dropped.labels("ended" if isinstance(error, ConnectionError) else "size").inc()
        except Exception as error:  # the request has its answer
            self._dropped.labels("failed").inc()
            logger.debug("a request could not be sent to the shadow: %s", error)

    def metrics_text(self) -> bytes:
        """Metrics of the shadow's process, which it writes every second, in Prometheus' text format."""
        text, running = b"", False
        with suppress(OSError):
            running = time.time() - self._metrics.stat().st_mtime < _SILENT_SECONDS
            text = self._metrics.read_bytes()
        return b"%b%b %d\n" % (text, _RUNNING, running)

    def close(self) -> None:
        self._closing = True
        self._socket.close()
        self._process.join(5)
        self._process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self) -> None:
        self._process.join()
        if not self._closing:
            logger.warning("the shadow has ended; predictions are served without it, until this server is restarted")


def _parts(body: bytes, results: Sequence[Result]) -> list[tuple[bytes, Sequence[Result]]]:
    """A request as one or several lists of samples with their results."""
    if len(body) <= _MESSAGE_BYTES or len(results) == 1:
        return [(body, results)]
    shared, samples, _ = parts_of(orjson.loads(body))
    count = max(1, len(samples) * _MESSAGE_BYTES // len(body))
    slices = [slice(start, start + count) for start in range(0, len(samples), count)]
    return [(orjson.dumps({"shared": shared, "samples": samples[each]}), results[each]) for each in slices]
