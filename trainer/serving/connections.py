"""HTTP connections of a server: how many there are, how long one may be silent, and the size of headers."""

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .service import Limits

HEALTH = "/livez", "/readyz", "/metrics"
SPARE = 256
"""Connections beyond the limit, on which health alone is answered; further ones are closed at once."""
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class BoundedConnection(HttpToolsProtocol):
    """A connection within limits.

    A connection beyond their number gets one refusal, and answers about the health of the server. A silent one is
    closed, and so is one whose headers are too large or do not arrive in time.

    Args:
        limits: those of the service.
        reject: counts a refusal by its reason.
        given: what uvicorn gives to a protocol.
    """

    def __init__(self, limits: Limits, reject: Callable[[str], None], **given: Any) -> None:
        super().__init__(**given)
        self._limits, self._reject, self._complete_app = limits, reject, self.app
        self._in_headers, self._header_bytes, self._header_deadline = True, 0, 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        beyond = len(self.connections) - self._limits.connections
        if beyond > 0:
            self.app = self._health_alone
        if beyond > SPARE:
            self._reject("connections")
            transport.abort()
        self._close_at(self.loop.time() + self._limits.idle_seconds)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_headers or self.transport.is_closing():
            self._header_bytes = 0
            return
        if not self._header_bytes:
            self._header_deadline = self.loop.time() + self._limits.request_seconds
        self._header_bytes += len(data)
        if self._header_bytes > self._limits.header_bytes:
            self._reject("headers")
            self.transport.write(_TOO_LARGE)
            self.transport.close()
        else:
            self._close_at(self._header_deadline)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True

    def on_headers_complete(self) -> None:
        self._in_headers = False
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._reject("bad_http")
        super().send_400_response(msg)

    def _close_at(self, moment: float) -> None:
        """Closes the connection then, unless more arrives; uvicorn unsets the timer at whatever arrives."""
        self.timeout_keep_alive_task = self.loop.call_at(moment, self.timeout_keep_alive_handler)

    async def _health_alone(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in HEALTH:
            await self._complete_app(scope, receive, send)
            return
        self._reject("connections")
        message = f"{self._limits.connections} connections are open, which is the limit; retry later"
        headers = {"Retry-After": "1", "Connection": "close"}
        content = orjson.dumps({"error": message})
        await Response(content, 503, headers, media_type="application/json")(scope, receive, send)
