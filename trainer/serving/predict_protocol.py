"""POST /predict on an HTTP connection: from the parser to the predictor, without an ASGI application.

uvicorn's request cycle, a task, and Starlette's routing, request and response would take several times as long as the
HTTP of a prediction itself, and a server that refuses most requests would do nothing else. Other requests go to the
ASGI application.
"""

import asyncio
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, ClassVar
from urllib.parse import unquote_to_bytes

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .predictor import Predictor

PATH = "/predict"
_STATUS_LINES = {each.value: f"HTTP/1.1 {each.value} {each.phrase}\r\n".encode() for each in HTTPStatus}
_JSON = b"content-type: application/json\r\ncontent-length: %d\r\n"


def predict_protocol(predictor: Predictor) -> type[HttpToolsProtocol]:
    """Creates the protocol of one server."""
    return type("PredictProtocol", (_PredictProtocol,), {"predictor": predictor})


class _Exchange:
    """A prediction request and its response; has the attributes of uvicorn's cycle that its protocol uses.

    Attributes:
        query: of its URL.
        since: time at which the header arrived.
        body: what has arrived of the body; None if it exceeds the limit.
        keep_alive: the connection stays open after the response.
        more_body: the request has not arrived completely.
    """

    __slots__ = ("_protocol", "body", "disconnected", "keep_alive", "more_body", "query", "response_complete",
                 "since")  # fmt: skip
    message_event: ClassVar = asyncio.Event()  # nothing waits for it

    def __init__(self, protocol: "_PredictProtocol", query: bytes, since: float, keep_alive: bool) -> None:
        self._protocol, self.query, self.since, self.keep_alive = protocol, query, since, keep_alive
        self.body: bytearray | None = bytearray()
        self.more_body = True
        self.response_complete = self.disconnected = False

    async def run_asgi(self, app: Any) -> None:
        """Called by uvicorn when all requests before it on the connection are answered."""
        self._protocol.take_turn(self)

    def answer(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        """Sends the response, JSON with a status and headers."""
        self.response_complete = True
        transport, state = self._protocol.transport, self._protocol.server_state
        if not transport.is_closing():
            lines = [_STATUS_LINES[status], _JSON % len(content)]
            lines += [b"%b: %b\r\n" % each for each in state.default_headers]
            lines += [f"{name}: {value}\r\n".encode() for name, value in headers.items()]
            close = not self.keep_alive or "Connection" in headers
            if close and "Connection" not in headers:
                lines.append(b"connection: close\r\n")
            transport.write(b"".join((*lines, b"\r\n", content)))
            if close:
                transport.close()
        self._protocol.on_response_complete()


class _PredictProtocol(HttpToolsProtocol):
    predictor: ClassVar[Predictor]

    _turn: _Exchange | None = None
    """The prediction to answer next; others on the connection wait in uvicorn's pipeline."""

    _read_at = 0.0
    """Time at which the read began that is handled now; else 0."""

    def data_received(self, data: bytes) -> None:
        self._read_at = time.monotonic()
        super().data_received(data)
        self._read_at = 0.0

    def on_headers_complete(self) -> None:
        url = httptools.parse_url(self.url)
        path = unquote_to_bytes(url.path) if b"%" in url.path else url.path
        if path != PATH.encode() or self.parser.get_method() != b"POST":
            super().on_headers_complete()
            return
        before: Any = self.cycle
        keep_alive = self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive()
        exchange: Any = _Exchange(self, url.query or b"", self._read_at, keep_alive)
        self.cycle = exchange
        if before is None or before.response_complete:
            self.take_turn(exchange)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((exchange, self.app))

    def on_body(self, body: bytes) -> None:
        exchange: Any = self.cycle
        if not isinstance(exchange, _Exchange):
            super().on_body(body)
            return
        if exchange.body is None:
            return
        exchange.body += body
        if len(exchange.body) > self.predictor.request_bytes:
            exchange.body = None
            self._answer_turn()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._answer_turn()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._answer_turn()

    def take_turn(self, exchange: _Exchange) -> None:
        """Answers a request, once it has arrived: all before it on the connection are answered."""
        self._turn = exchange
        if self.expect_100_continue and exchange.more_body and not exchange.body:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._answer_turn()

    def _answer_turn(self) -> None:
        """Answers the request whose turn it is, if it has arrived and the client reads its answers."""
        exchange = self._turn
        if exchange is None or self.flow.write_paused or self.transport.is_closing():
            return
        if exchange.body is None:
            self._turn = None
            self.predictor.reject_large(exchange)
        elif not exchange.more_body:
            self._turn = None
            self.predictor.predict(exchange, bytes(exchange.body), self._read_at or time.monotonic())
