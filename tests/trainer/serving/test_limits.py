"""`cowrec serve` refuses what exceeds its limits, and no client keeps it from answering others."""

import contextlib
import json
import signal
import socket
from collections import Counter
from collections.abc import Iterator

import pytest

from serving import GOOD, Serving, serving, trained_and_exported, unfinished

CONNECTIONS, CLIENT_CONNECTIONS = 20, 16
LIMITS = ("--max-concurrent", "4", "--max-connections", str(CONNECTIONS), "--request-seconds", "10")
HEAD = b"POST /predict HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("limits")
    trained_and_exported(folder)
    with serving(folder / "export", *LIMITS, "--max-client-connections", str(CLIENT_CONNECTIONS)) as server:
        yield server


@pytest.fixture(scope="module")
def stalled(server: Serving) -> Iterator[list[socket.socket]]:
    """Clients that send nothing, half a line, half a body, and nothing but empty lines after an answer."""
    begun = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(4)]
    begun[1].sendall(b"POST /pre")
    begun[2].sendall(HEAD + b"Content-Length: 10\r\n\r\n[")
    begun[3].sendall(b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n")
    assert begun[3].recv(1000).startswith(b"HTTP/1.1 404")
    begun[3].sendall(b"\r\n")
    yield begun
    for each in begun:
        each.close()


def test_clients_that_send_slowly_keep_no_slot(server: Serving, stalled: list[socket.socket]) -> None:
    """Five requests of which a byte of the body is missing; the limit is four at a time."""
    held = [unfinished(server) for _ in range(5)]
    for _ in range(10):
        assert server.predict(GOOD)[0] == 200
    for connection, remainder in held:
        connection.sendall(remainder)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        connection.close()


def test_requests_beyond_the_concurrency_limit_are_rejected(server: Serving, stalled: list[socket.socket]) -> None:
    """Six arrive at once, as the server was stopped meanwhile."""
    held = [unfinished(server) for _ in range(6)]
    assert server.predict(GOOD)[0] == 200  # what was sent before has arrived
    server.process.send_signal(signal.SIGSTOP)
    for connection, remainder in held:
        connection.sendall(remainder)
    server.process.send_signal(signal.SIGCONT)
    answers = [connection.recv(1000) for connection, _ in held]
    assert Counter(answer[9:12] for answer in answers) == {b"200": 4, b"503": 2}
    refused = next(answer for answer in answers if answer[9:12] == b"503").lower()
    assert b"retry-after: 1" in refused
    assert b"4 requests are in progress" in refused
    for connection, _ in held:
        connection.close()
    assert server.predict(GOOD)[0] == 200


def endless(server: Serving, start: bytes, part: bytes) -> bytes:
    """Sends a part again and again until the server ends the connection; returns its answer, if that arrives."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(start)
        with contextlib.suppress(ConnectionError):
            for _ in range(20_000):
                client.sendall(part)
            raise AssertionError("the server has read 80 MB")
        with contextlib.suppress(ConnectionError):
            return client.recv(1000)
    return b"closed"


@pytest.mark.parametrize(
    ("start", "part"),
    [
        (HEAD + b"X: ", b"x" * 4096),
        (HEAD, b"X: y\r\n" * 680),
        (b"GET /", b"x" * 4096),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: ", b"x" * 4096),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;", b"x" * 4096),
    ],
)
def test_endless_headers_are_rejected(server: Serving, start: bytes, part: bytes) -> None:
    answer = endless(server, start, part)
    assert answer == b"closed" or answer[9:12] in (b"431", b"400"), answer
    assert server.predict(GOOD)[0] == 200


def test_further_connections_of_a_client_are_rejected(server: Serving, stalled: list[socket.socket]) -> None:
    """Of another address they are accepted, up to the limit of all; those refused take no place."""
    opened: list[tuple[socket.socket, bytes]] = []

    def answers(host: str, count: int) -> Counter[bytes]:
        here = [socket.create_connection(("127.0.0.1", server.port), 60, (host, 0)) for _ in range(count)]
        for each in here:
            with contextlib.suppress(ConnectionError):
                each.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        found = []
        for each in here:
            try:
                found.append(each.recv(4000)[9:12])
            except ConnectionError:
                found.append(b"503")  # closed before the request was sent
            opened.append((each, found[-1]))
        return Counter(found)

    try:
        first = answers("127.0.0.1", CLIENT_CONNECTIONS + 2)
        assert first[b"503"] >= 2
        assert CLIENT_CONNECTIONS - 4 <= first[b"200"] <= CLIENT_CONNECTIONS
        others = answers("127.0.0.2", 8)
        assert others[b"200"] >= CONNECTIONS - CLIENT_CONNECTIONS
        assert first[b"200"] + others[b"200"] <= CONNECTIONS
    finally:
        for each, _ in opened:
            each.close()
    assert server.wait_for("status", "ok")


def test_connections_without_a_complete_request_end(server: Serving, stalled: list[socket.socket]) -> None:
    answers = [each.recv(1000) for each in stalled]
    assert [answer[9:12] for answer in answers] == [b"", b"408", b"408", b""]
    assert json.loads(answers[1].partition(b"\r\n\r\n")[2])["error"].startswith("the request did not arrive within 10")
    assert server.metrics()["cowrec_rejected_requests_total{reason=slow}"] == 2
