"""POST /predict on a connection: pipelined requests are answered in order, and a refusal keeps it open."""

import http.client
import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving import GOOD, Serving, serving, trained_and_exported


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("protocol")
    trained_and_exported(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Serving]:
    with serving(folder / "export", "--max-concurrent", "2", "--max-request-bytes", "20000") as server:
        yield server


def post(body: Any, path: str = "/predict", headers: str = "", version: str = "1.1") -> bytes:
    """A request; a body of bytes is sent unchanged, others as JSON."""
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"POST {path} HTTP/{version}\r\nHost: x\r\n{headers}Content-Length: {len(sent)}\r\n\r\n".encode() + sent


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


def answers(server: Serving, sent: bytes, count: int, *, stopped: bool = False) -> list[tuple[int, Any, bool]]:
    """Status, content and whether the connection closes, of each answer; the server may be stopped while it is sent."""
    found = []
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        if stopped:
            server.process.send_signal(signal.SIGSTOP)
        connection.sendall(sent)
        if stopped:
            server.process.send_signal(signal.SIGCONT)
        file = connection.makefile("rb")
        for _ in range(count):
            answer = http.client.HTTPResponse(_Shared(file))
            answer.begin()
            found.append((answer.status, json.loads(answer.read()), answer.will_close))
        if found[-1][2]:
            assert not file.read()
    return found


class _Shared:
    """A socket as http.client reads it, whose file goes on after an answer."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def makefile(self, _: str) -> Any:
        return _Unclosed(self._file)


class _Unclosed:
    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return (lambda: None) if name == "close" else getattr(self._file, name)


def test_pipelined_requests_are_answered_in_order(server: Serving) -> None:
    """Predictions between requests of the application, refusals between predictions, all in one write."""
    price = [{**GOOD, "price": number} for number in range(4)]
    alone = [server.predict(each)[1] for each in price]
    requests = [
        *(post(price[0]), get("/livez"), post(b"{"), post(price[1]), post([]), get("/predict"), get("/livez")),
        *(post(price[2], "/predict?timeout_ms=0"), post(price[3], "/%70redict?timeout_ms=900"), post({}, "/nothing")),
    ]
    found = answers(server, b"".join(requests), len(requests), stopped=True)
    assert [status for status, _, _ in found] == [200, 200, 400, 200, 200, 405, 200, 400, 200, 404]
    assert [found[index][1] for index in (0, 3, 8)] == [alone[index] for index in (0, 1, 3)]
    assert not any(closes for _, _, closes in found)


def test_a_thousand_pipelined_requests_are_answered(server: Serving) -> None:
    """More than one read; each waits for the answer before it, so none is refused."""
    found = answers(server, 1000 * post(b"[]") + 1000 * post(b"{") + post(GOOD), 2001)
    assert [status for status, _, _ in found] == [200] * 1000 + [400] * 1000 + [200]


def test_a_refusal_keeps_the_connection(server: Serving) -> None:
    """Five clients send at once, two slots are free: those refused are served on the same connection later."""
    connections = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(5)]

    def answer_of(connection: socket.socket) -> tuple[Any, ...]:
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        known = "probability" in json.loads(answer.read())
        return answer.status, answer.headers["Retry-After"], answer.will_close, "date" in answer.headers, known

    expected = [(200, None, False, True, True)]
    for stopped in (False, True, False):
        answers = []
        if stopped:
            server.process.send_signal(signal.SIGSTOP)
        for each in connections:
            each.sendall(post(GOOD))
            answers += [] if stopped else [answer_of(each)]
        if stopped:
            server.process.send_signal(signal.SIGCONT)
            answers += map(answer_of, connections)
        assert sorted(answers) == (2 * expected + 3 * [(503, "1", False, True, False)] if stopped else 5 * expected)
    for each in connections:
        each.close()


def test_connections_that_end_after_an_answer(server: Serving) -> None:
    for request in (post(GOOD, headers="Connection: close\r\n"), post(GOOD, version="1.0")):
        assert [(status, closes) for status, _, closes in answers(server, request, 1)] == [(200, True)]
    large = post(GOOD) + post(b" " * 30_000)
    assert [(status, closes) for status, _, closes in answers(server, large, 2)] == [(200, False), (413, True)]


def test_a_client_that_expects_to_continue(server: Serving) -> None:
    """The body is sent after the word of the server, also behind another request."""
    request = post(GOOD, headers="Expect: 100-continue\r\n")
    head, _, body = request.partition(b"\r\n\r\n")
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(get("/livez") + head + b"\r\n\r\n")
        received = b""
        while not received.endswith(b"HTTP/1.1 100 Continue\r\n\r\n"):
            received += connection.recv(1000)
        assert received.startswith(b"HTTP/1.1 200")
        connection.sendall(body)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")


UPGRADE = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"


def test_a_client_that_would_rather_speak_another_protocol(server: Serving) -> None:
    """As Java's does: it is answered in HTTP/1.1, in order, whatever it pipelines and however it splits a request."""
    upgrade, websocket = post(GOOD, headers=UPGRADE), "Connection: upgrade, close\r\nUpgrade: websocket\r\n"
    expected = (200, server.predict(GOOD)[1], False)
    plain = get("/livez").replace(b"\r\n\r\n", f"\r\n{UPGRADE}\r\n".encode())
    found = answers(server, upgrade + plain + post(b"{", headers=UPGRADE) + upgrade + post(GOOD, headers=websocket), 5)
    assert [found[0], found[3], found[4]] == [expected, expected, (*expected[:2], True)]
    assert [status for status, _, _ in found[1:3]] == [200, 400]
    assert answers(server, 1000 * post(b"[]", headers=UPGRADE) + upgrade, 1001)[-1] == expected
    last = post(GOOD, headers="Connection: close\r\n")
    assert answers(server, upgrade + last + post(GOOD), 2) == [expected, (*expected[:2], True)]
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        for start in range(0, len(upgrade), 7):
            connection.sendall(upgrade[start : start + 7])
            time.sleep(0.001)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        connection.sendall(b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 400")
    assert server.predict(GOOD)[0] == 200


def test_a_client_that_does_not_read_its_answers(server: Serving) -> None:
    """It pipelines requests without end: the server stops reading them, and serves others."""
    requests = 10_000 * post(b"{")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(3)
        connection.connect(("127.0.0.1", server.port))
        with pytest.raises(TimeoutError):
            connection.sendall(100 * requests)
        assert server.predict(GOOD)[0] == 200
