"""The server refuses what exceeds its limits, and answers others meanwhile."""

import contextlib
import http.client
import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from cowrec.trainer.serving.service import Limits, Service
from serving import GOOD, Client, served_folder, serving, serving_here, unfinished
from trainer_cases import free_port

Server = tuple[Client, Service]
HEAD = b"POST /predict HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    limits = Limits(concurrent_requests=4, request_seconds=3, connections=40)
    with serving_here(served_folder() / "export", limits) as server:
        yield server


def answer_of(connection: socket.socket) -> tuple[int, bool, bool, str]:
    """Status of an answer, whether it says when to try again, whether the connection closes, and its error."""
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer.status, "Retry-After" in answer.headers, answer.will_close, json.loads(answer.read()).get("error", "")


def at_once(server: Server, requests: list[tuple[socket.socket, bytes]]) -> Counter[tuple[int, bool, bool, str]]:
    """Answers to requests that arrive while the server computes another one."""
    client, service = server
    computing, sent, compute = threading.Event(), threading.Event(), service.batcher._compute

    def slowly(samples: list) -> object:
        computing.set()
        assert sent.wait(60)
        return compute(samples)

    service.batcher._compute = slowly
    first = threading.Thread(target=client.predict, args=(GOOD,))
    first.start()
    assert computing.wait(60)
    service.batcher._compute = compute
    for connection, content in requests:
        connection.sendall(content)
    sent.set()
    first.join()
    return Counter(answer_of(connection) for connection, _ in requests)


def test_requests_beyond_the_concurrency_limit_are_refused(server: Server) -> None:
    """Of six that arrive at once four have a slot; those refused are served on the same connections later."""
    body = json.dumps(GOOD).encode()
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    connections = [socket.create_connection(("127.0.0.1", server[0].port), timeout=60) for _ in range(6)]
    busy = "4 requests are in progress, which is the limit; retry later"
    answers = at_once(server, [(each, request) for each in connections])
    assert answers == {(200, False, False, ""): 4, (503, True, False, busy): 2}
    assert server[0].metrics()["cowrec_rejected_requests_total{reason=busy}"] == 2
    for each in connections:
        each.sendall(request)
        assert answer_of(each)[0] == 200
        each.close()


def test_requests_that_are_late_are_refused(server: Server) -> None:
    """Two arrive while another one is computed, due in a microsecond."""
    client, body = server[0], json.dumps(GOOD).encode()
    request = b"POST /predict?timeout_ms=0.001 HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    connections = [socket.create_connection(("127.0.0.1", client.port), timeout=60) for _ in range(2)]
    late = "no prediction could be made within 0.001 ms; retry later"
    assert at_once(server, [(each, request) for each in connections]) == {(503, True, False, late): 2}
    assert client.metrics()["cowrec_rejected_requests_total{reason=late}"] == 2
    for connection in connections:
        connection.close()
    status, answer = client.ask("POST", "/predict?timeout_ms=soon", GOOD)
    assert (status, "timeout_ms must be a number above 0, got 'soon'" in answer["error"]) == (400, True)
    assert client.ask("POST", "/predict?timeout_ms=1e9", GOOD)[0] == 200


def test_clients_that_send_slowly_keep_no_slot(server: Server) -> None:
    """Of ten requests a byte of the body is missing, and the limit is four at a time; one of them never arrives."""
    client = server[0]
    held = [unfinished(client) for _ in range(10)]
    assert client.predict(GOOD)[0] == 200
    for connection, remainder in held[:4]:
        connection.sendall(remainder)
        assert answer_of(connection)[0] == 200
    late = answer_of(held[9][0])
    assert late == (408, False, True, "the request did not arrive within 3 seconds")
    for connection, _ in held:
        connection.close()


def test_connections_beyond_the_limit_are_refused(server: Server) -> None:
    client = server[0]
    opened = [socket.create_connection(("127.0.0.1", client.port), timeout=60) for _ in range(60)]
    statuses = []
    for each in opened:
        each.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        statuses.append(each.recv(4000)[9:12])
    assert Counter(statuses)[b"503"] >= 20
    for each in opened:
        each.close()
    assert client.wait_for("status", "ok")


def test_a_request_to_change_the_protocol_is_refused(server: Server) -> None:
    """As Java's client does it with each request, unless it is told not to."""
    body = json.dumps(GOOD).encode()
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", server[0].port), timeout=60) as connection:
        connection.sendall(HEAD + upgrade + body)
        status, _, closes, error = answer_of(connection)
        assert (status, closes, "speak plain HTTP/1.1" in error) == (400, True, True)


def test_a_port_for_health_alone() -> None:
    port = free_port()
    with serving(served_folder() / "export", "--health-port", str(port)) as server:
        for path in ("/livez", "/readyz", "/health", "/metrics"):
            assert server.ask("GET", path, port=port)[0] == 200
        with contextlib.suppress(ConnectionError):
            assert server.ask("POST", "/predict", GOOD, port)[0] == 404
