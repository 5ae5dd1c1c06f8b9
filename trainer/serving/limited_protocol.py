"""HTTP connections with limits on their number, on headers, and on the time that a client takes; without upgrades.

httptools, the parser that uvicorn uses, has none of these limits; h11, its other parser, limits headers alone and takes
longer.
"""

import asyncio
import json
import sys
from collections import Counter
from typing import ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .limits import Limits
from .metrics import ServiceMetrics

HEADER_BYTES = 16 << 10
"""Bytes of a request besides its body that arrive after its first read: headers, chunk sizes, trailers."""
_CHECK_SECONDS = 0.5
_UPGRADING = (b"connection", b"upgrade", b"http2-settings")
"""Fields of a header that ask for another protocol."""
_KEPT = (b"close", b"keep-alive")
"""Values of the field connection that do not."""


def limited_protocol(
    limits: Limits, metrics: ServiceMetrics, protocol: type[HttpToolsProtocol] = HttpToolsProtocol
) -> type[HttpToolsProtocol]:
    """Creates the protocol of one server: another protocol with limits."""
    attributes = {"limits": limits, "metrics": metrics, "clients": Counter()}
    return type("LimitedProtocol", (_Limited, _WithoutUpgrades, protocol), attributes)


class _Limited(HttpToolsProtocol):
    limits: ClassVar[Limits]
    metrics: ClassVar[ServiceMetrics]
    clients: ClassVar[Counter[str]]
    """Open connections by address."""

    _host = ""
    _late_at: float | None = None
    """Time at which the client must have sent its request, or read its response; None while it has nothing to do."""
    _has_begun = False
    """Whether a part of a request has arrived."""
    _excess = 0
    """Bytes of the request so far, less twice those of its body, so that chunks of a few bytes are refused too."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._host = self.client[0] if self.client else ""
        self.clients[self._host] += 1
        self._expect_client()
        self._check_time()
        if len(self.connections) > self.limits.connections:
            self._refuse(503, "connections", f"{self.limits.connections} connections are open, which is the limit")
        elif self.clients[self._host] > self.limits.client_connections:
            limit = self.limits.client_connections
            self._refuse(503, "client_connections", f"{limit} connections of {self._host} are open, which is the limit")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.clients[self._host] -= 1
        if not self.clients[self._host]:
            del self.clients[self._host]

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._late_at is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_client()
        self._excess += len(data)
        super().data_received(data)
        if self._excess > HEADER_BYTES:
            self._refuse(431, "headers", f"headers have more than {HEADER_BYTES:,} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_begun = True
        self._excess = 0  # of the next read on: where in this one the request begins is not known
        self._expect_client()

    def on_body(self, body: bytes) -> None:
        self._excess -= 2 * len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._late_at, self._has_begun = None, False
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_client()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._late_at = None

    def _expect_client(self) -> None:
        self._late_at = self.loop.time() + self.limits.request_seconds

    def _check_time(self) -> None:
        if self._late_at is not None and self.loop.time() >= self._late_at:
            if self._has_begun:
                seconds = self.limits.request_seconds
                self._refuse(408, "slow", f"the request did not arrive within {seconds:g} seconds")
            self.transport.abort() if self.flow.write_paused else self.transport.close()
        elif not self.transport.is_closing():
            self.loop.call_later(_CHECK_SECONDS, self._check_time)

    def _refuse(self, status: int, reason: str, message: str) -> None:
        """Answers with an error and closes the connection."""
        if self.transport.is_closing():
            return
        self.metrics.rejected.labels(reason).inc()
        body = json.dumps({"error": message}).encode()
        head = f"HTTP/1.1 {status} Refused\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self.transport.write(f"{head}Retry-After: 1\r\nConnection: close\r\n\r\n".encode() + body)
        self.transport.close()


class _WithoutUpgrades(HttpToolsProtocol):
    """Answers a request to change the protocol as if it were not one, which HTTP allows (RFC 9110, section 7.8).

    Clients that prefer HTTP/2, such as Java's, ask for it with their requests. The parser takes what follows the header
    for the other protocol, so the request is parsed once more, without the fields that ask for it.
    """

    _data = b""
    """What is parsed now."""
    _again = b""
    """What is to be parsed once more."""

    def data_received(self, data: bytes) -> None:
        self._again = data
        while self._again:
            self._data, self._again = self._again, b""
            super().data_received(self._data)

    def on_headers_complete(self) -> None:
        if not self._is_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._is_upgrade():
            super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Called by uvicorn while it handles the parser's exception, which has the length of what was parsed."""
        raised = sys.exception()
        if not (self._is_upgrade() and isinstance(raised, httptools.HttpParserUpgrade)):
            self.transport.close()  # CONNECT
            return
        kept = [(name, value) for name, value in self.headers if name not in _UPGRADING]
        wanted = b",".join(value.lower() for name, value in self.headers if name == b"connection").split(b",")
        kept += [(b"connection", each) for each in _KEPT if each in map(bytes.strip, wanted)]
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version), *(b"%b: %b" % each for each in kept)]
        self._again = b"\r\n".join((*lines, b"\r\n")) + self._data[raised.args[0] :]
        self.parser = httptools.HttpRequestParser(self)
        if hasattr(self.parser, "set_dangerous_leniencies"):  # as uvicorn does, to answer what came before
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _is_upgrade(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
