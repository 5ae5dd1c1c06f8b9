"""`cowrec serve` refuses what exceeds its limits, and no client keeps it from answering others."""

import contextlib
import http.client
import json
import signal
import socket
from collections import Counter
from collections.abc import Iterator

import pytest

from serving import GOOD, Serving, serving, trained_and_exported, unfinished
from trainer_cases import free_port

CONNECTIONS, CLIENT_CONNECTIONS = 20, 16
LIMITS = ("--max-concurrent", "4", "--max-connections", str(CONNECTIONS), "--request-seconds", "10")
HEAD = b"POST /predict HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def health_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, health_port: int) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("limits")
    trained_and_exported(folder)
    client = ("--max-client-connections", str(CLIENT_CONNECTIONS))
    with serving(folder / "export", *LIMITS, *client, "--health-port", str(health_port)) as server:
        yield server


@pytest.fixture(scope="module")
def stalled(server: Serving) -> Iterator[list[socket.socket]]:
    """Clients that send nothing, half a line, half a body, and nothing but empty lines after an answer."""
    begun = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(4)]
    begun[1].sendall(b"POST /pre")
    begun[2].sendall(HEAD + b"Content-Length: 10\r\n\r\n[")
    begun[3].sendall(b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer_of(begun[3])[0] == 404
    begun[3].sendall(b"\r\n")
    yield begun
    for each in begun:
        each.close()


def answer_of(connection: socket.socket) -> tuple[int, bool, str]:
    """Status of an answer, whether it says when to try again, and its error."""
    with http.client.HTTPResponse(connection) as answer:
        answer.begin()
        return answer.status, "Retry-After" in answer.headers, json.loads(answer.read()).get("error", "")


def test_clients_that_send_slowly_keep_no_slot(server: Serving, stalled: list[socket.socket]) -> None:
    """Five requests of which a byte of the body is missing; the limit is four at a time."""
    held = [unfinished(server) for _ in range(5)]
    for _ in range(10):
        assert server.predict(GOOD)[0] == 200
    for connection, remainder in held:
        connection.sendall(remainder)
        assert answer_of(connection)[0] == 200
        connection.close()


def test_requests_beyond_the_concurrency_limit_are_rejected(server: Serving, stalled: list[socket.socket]) -> None:
    """Six arrive at once, as the server was stopped meanwhile."""
    held = [unfinished(server) for _ in range(6)]
    assert server.predict(GOOD)[0] == 200  # what was sent before has arrived
    server.process.send_signal(signal.SIGSTOP)
    for connection, remainder in held:
        connection.sendall(remainder)
    server.process.send_signal(signal.SIGCONT)
    answers = Counter(answer_of(connection) for connection, _ in held)
    busy = "4 requests are in progress, which is the limit; retry later"
    assert answers == {(200, False, ""): 4, (503, True, busy): 2}
    for connection, _ in held:
        connection.close()
    assert server.predict(GOOD)[0] == 200


def test_requests_that_would_be_late_are_rejected(server: Serving, stalled: list[socket.socket]) -> None:
    """Four of a thousand samples arrive at once, due in a microsecond: the first is late, the others wait for it."""
    assert server.predict([GOOD] * 1000)[0] == 200  # measures the time for a sample
    body = json.dumps([GOOD] * 1000).encode()
    request = b"POST /predict?timeout_ms=0.001 HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    held = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(4)]
    for connection in held:
        connection.sendall(request[:-1])
    assert server.predict(GOOD)[0] == 200
    server.process.send_signal(signal.SIGSTOP)
    for connection in held:
        connection.sendall(request[-1:])
    server.process.send_signal(signal.SIGCONT)
    assert {answer_of(connection)[:2] for connection in held} == {(503, True)}
    metrics = server.metrics()
    assert metrics["cowrec_rejected_requests_total{reason=late}"] >= 1
    assert metrics["cowrec_rejected_requests_total{reason=queue}"] >= 1
    for connection in held:
        connection.close()
    status, answer = server.ask("POST", "/predict?timeout_ms=soon", GOOD)
    assert (status, "timeout_ms must be a number above 0, got 'soon'" in answer["error"]) == (400, True)
    assert server.ask("POST", "/predict?timeout_ms=1e9", GOOD)[0] == 200


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


def test_further_connections_of_a_client_are_rejected(
    server: Serving, health_port: int, stalled: list[socket.socket]
) -> None:
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
        for path in ("/livez", "/readyz", "/health", "/metrics"):  # a port and a thread of their own
            assert server.ask("GET", path, port=health_port)[0] == 200
        assert server.ask("POST", "/predict", GOOD, health_port)[0] == 404
    finally:
        for each, _ in opened:
            each.close()
    assert server.wait_for("status", "ok")


def test_connections_without_a_complete_request_end(server: Serving, stalled: list[socket.socket]) -> None:
    answers = [each.recv(1000) for each in stalled]
    assert [answer[9:12] for answer in answers] == [b"", b"408", b"408", b""]
    assert json.loads(answers[1].partition(b"\r\n\r\n")[2])["error"].startswith("the request did not arrive within 10")
    assert server.metrics()["cowrec_rejected_requests_total{reason=slow}"] == 2
