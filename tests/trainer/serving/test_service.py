"""`cowrec serve` predicts what `cowrec predict` does, refuses bad requests and too many, and stops cleanly.

With `--follow` it applies published versions while it answers, and keeps answering if the target fails.
"""

import asyncio
import contextlib
import functools
import http.client
import json
import math
import re
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from safetensors.torch import load_file

from commands.command_line import Cowrec
from cowrec.trainer.export.export import export_run
from cowrec.trainer.export.manifest import Manifest, fingerprint
from cowrec.trainer.publishing.blob import Change, TableChange
from cowrec.trainer.publishing.publisher import Publisher
from cowrec.trainer.publishing.target import open_target
from cowrec.trainer.serving.request_samples import Rejected, RequestSample, samples_of
from cowrec.trainer.serving.service import Late, Limits, MicroBatcher, Service
from refusal import refused
from run_comparison import wait_for
from servers.redis_server import redis_server
from serving import DEADLINE, GOOD, Client, predictions, raw_samples, served_folder, serving, serving_here, unfinished
from trained_runs import run
from trainer_cases import free_port

NESTED = "[" * 995 + "]" * 995
"""Lists in each other, fewer than `orjson` refuses, more than Python's `repr` and `json` can show."""


@pytest.fixture(scope="module")
def folder() -> Path:
    """A run and its export."""
    return served_folder()


@functools.cache
def with_longer_run() -> Path:
    """The same folder, with a run of one more epoch and its export."""
    folder = served_folder()
    run(folder, folder / "longer")
    export_run(folder / "longer", folder / "longer-export")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Client]:
    with serving_here(folder / "export", Limits(samples=60, timeout_ms=1000 * DEADLINE)) as (server, _):
        yield server


def test_predictions_match_predict_one_by_one_and_together(folder: Path, server: Client) -> None:
    """float32 sums in another order: 1e-6 is about ten units in the last place of a probability."""
    samples, expected = raw_samples(folder), predictions(folder, "run")
    status, together = server.predict(samples)
    assert status == 200
    assert together["version"] == 0
    np.testing.assert_allclose(together["probabilities"], expected, atol=1e-6)
    for sample, probability in zip(samples[:10], expected[:10], strict=True):
        status, alone = server.predict(sample)
        assert status == 200
        assert alone["probability"] == pytest.approx(probability, abs=1e-6)
    assert server.predict([]) == (200, {"version": 0, "probabilities": []})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is not JSON"),
        (b"[" * 5000, "the body is not JSON"),
        (3, "sample 0 must be a JSON object of fields and their values, got 3"),
        ({}, "columns price, city, tags, history are missing; use null for a missing value"),
        ([GOOD, {**GOOD, "city": {}}], "sample 1: column city: must be a string, a number, true, false"),
        ({**GOOD, "price": "much"}, "column price: must be a number"),
        (json.dumps({**GOOD, "city": "x"}).replace('"x"', NESTED).encode(), "column city: must be a string, a number"),
        ({**GOOD, "tags": [["t1"]]}, "column tags"),
        ({**GOOD, "history": [{"id": "h1"}]}, "column history"),
    ],
)
def test_bad_input_is_rejected_with_a_reason(server: Client, body: Any, message: str) -> None:
    status, answer = server.predict(body)
    assert status == 400
    assert message in answer["error"]


def test_an_id_of_many_digits_is_its_text() -> None:
    """The parser of requests reads it as a float."""
    for number in (2**63 - 1, 2**64, 2**128 - 1):
        (sample,), _ = samples_of(b'{"city": %d}' % number, 1)
        assert sample.fields == {"city": number}
    with pytest.raises(Rejected, match="the body is not JSON"):
        samples_of(b'{"city": ' + b"9" * 5000 + b"}", 1)


def test_requests_with_shared_fields(server: Client) -> None:
    """The candidates of one user: equal to the expanded request, and errors name what they are in."""
    user = {"tags": ["t1", "t2"], "history": GOOD["history"]}
    items = [{"city": f"city{index}", "price": index} for index in range(5)]
    status, answer = server.predict({"shared": user, "samples": items})
    assert (status, answer) == server.predict([{**user, **item} for item in items])
    assert (status, len(answer["probabilities"])) == (200, 5)
    samples = [{**GOOD, "city": f"city{number % 7}", "price": number} for number in range(40)]
    for names in (["price", "tags"], ["city", "history"], list(GOOD), []):  # the others differ between samples
        shared = {name: GOOD[name] for name in names} | {"unknown": 1}
        own = [{name: value for name, value in sample.items() if name not in names} for sample in samples]
        assert server.predict({"shared": shared, "samples": own}) == server.predict([fields | shared for fields in own])
    assert server.predict({"shared": user, "samples": []})[1]["probabilities"] == []
    city, rest = {"city": "of one long id" * 20_000}, [{**user, "price": index % 5} for index in range(60)]
    assert server.predict({"shared": city, "samples": rest})[0] == 200
    for body, expected in (
        ({"shared": {**user, "tags": 3}, "samples": items}, (400, "shared: column tags: must be a list")),
        ({"shared": user, "samples": [*items, {"city": 1}]}, (400, "sample 5: column price is missing")),
        ({"shared": user, "samples": [3]}, (400, "sample 0 must be a JSON object")),
        ({"shared": user, "samples": items * 13}, (413, "a request has 65 samples, the limit is 60")),
    ):
        status, answer = server.predict(body)
        assert (status, answer["error"][: len(expected[1])]) == expected


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
fields = st.fixed_dictionaries({}, optional=dict.fromkeys((*GOOD, "label", "time", "sample_id", "x"), json_values))


@given(st.binary(max_size=40) | json_values | fields | st.lists(fields, max_size=3) | st.lists(
    st.fixed_dictionaries(dict.fromkeys(GOOD, json_values)), min_size=1, max_size=3) | st.fixed_dictionaries(
    {"shared": fields | json_values, "samples": st.lists(fields, max_size=3) | json_values}))  # fmt: skip
def test_no_request_breaks_the_service(server: Client, body: Any) -> None:
    """Any bytes and any JSON get predictions or a reason, never a server error; a good sample still gets its answer.

    ``--hypothesis-show-statistics`` shows how many got which status.
    """
    status, answer = server.predict(body)
    event(f"status {status}")
    assert status in (200, 400)
    assert ("error" in answer) == (status == 400)
    mixed = server.predict(GOOD)
    assert mixed[0] == 200


def test_large_requests_are_rejected(server: Client) -> None:
    for (status, answer), limit in (
        (server.predict([GOOD] * 61), "61 samples, the limit is 60"),
        (server.predict([{**GOOD, "city": "x" * (1 << 20)}]), "the limit is 1,048,576 bytes"),
    ):
        assert (status, limit in answer["error"]) == (413, True)
    assert server.predict(GOOD)[0] == 200


def test_a_prediction_that_is_not_finite_is_rejected(server: Client) -> None:
    """Weights that are finite, but whose sums are not; a prediction in the same batch gets its answer."""
    huge = {**GOOD, "history": [{"id": "h1", "weight": 3e38}, {"id": "h2", "weight": -3e38}] * 2}
    status, answer = server.predict([GOOD, huge])
    assert (status, "sample 1: " in answer.get("error", "")) == (400, True), answer
    assert server.predict(GOOD)[0] == 200


def test_wrong_paths_and_methods(server: Client) -> None:
    status, answer = server.ask("GET", "/nothing")
    known = ("POST /predict", "GET /livez", "GET /readyz", "GET /metrics")
    assert (status, all(name in answer["error"] for name in known)) == (404, True), answer
    assert server.ask("GET", "/predict")[0] == 405
    assert server.predict(GOOD)[0] == 200
    assert server.ask("POST", "/predict/", GOOD)[0] == 404  # no redirection to the host that the client names


def test_metrics(server: Client) -> None:
    before = server.metrics()
    for body in (GOOD, [GOOD, {**GOOD, "city": "nowhere"}], b"{", [GOOD, 3]):
        server.predict(body)
    after = server.metrics()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown("cowrec_predictions_total") == grown("cowrec_batch_samples_sum") == 3
    assert [grown(f"cowrec_unknown_ids_total{{field={field}}}") for field in ("city", "tags", "history")] == [1, 0, 0]
    for reason in ("bad_json", "bad_sample"):
        assert grown(f"cowrec_rejected_requests_total{{reason={reason}}}") == 1
    for status in (200, 400):
        assert grown(f"cowrec_request_seconds_count{{route=/predict,status={status}}}") == 2
    assert (after["cowrec_model_step"], after["cowrec_model_version"]) == (5, 0)
    assert np.isnan(after["cowrec_following"])
    assert (after["cowrec_queued_requests"], after["cowrec_open_connections"]) == (0, 1)
    assert after["process_resident_memory_bytes"] > 1e6
    assert any(name.startswith("cowrec_build_info{cowrec=") for name in after)
    assert np.isnan(after["cowrec_model_age_seconds"])  # its samples have no time


def test_fields_whose_ids_are_mostly_unknown_are_told_once(folder: Path, caplog: Any) -> None:
    """A client writes the ids of one field in another way; the ids of another are new now and then."""
    service = Service(folder / "export")
    service.load()
    try:
        for number in range(11):
            sample = {**GOOD, "city": f"CITY{number}", "tags": "new" if number < 4 else "t1"}
            service.compute([RequestSample(sample)] * 20)
    finally:
        service.close()
    (line,) = [message for message in caplog.messages if "training did not have" in message]
    assert line.startswith("the first 100 samples have ids that training did not have: city 100, tags 80; check")


def test_sigterm_lets_requests_in_progress_finish(folder: Path) -> None:
    """Another port is for health alone."""
    port = free_port()
    with serving(folder / "export", "--max-samples", "2", "--health-port", str(port), imports=True) as server:
        for path in ("/livez", "/readyz", "/metrics"):
            assert server.ask("GET", path, port=port)[0] == 200
        with contextlib.suppress(ConnectionError):
            assert server.ask("POST", "/predict", GOOD, port)[0] == 404
        assert [server.predict([GOOD] * count)[0] for count in (2, 3)] == [200, 413]
        connection, remainder = unfinished(server)
        server.metrics()  # answered, so the request before it is in progress
        server.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(ConnectionError):
            while True:  # until no connection is accepted
                socket.create_connection(("127.0.0.1", server.port), timeout=30).close()
        with connection:
            connection.sendall(remainder)
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        stderr = server.process.communicate(timeout=600)[1]
        assert (server.process.returncode, "Traceback" in stderr) == (0, False), stderr
        assert f"cowrec: listening on http://127.0.0.1:{server.port}: POST /predict" in stderr
        assert f"cowrec: {folder / 'export'} is served: step 5\n" in stderr


def test_a_server_that_stops_says_so_before_it_closes(folder: Path) -> None:
    with serving_here(folder / "export", Limits(timeout_ms=1000 * DEADLINE), drain_seconds=2.0) as (client, _):
        client.stop()
        stopping = client.wait_for("ready", False)
        assert stopping["problem"] == "the server is stopping"
        assert client.predict(GOOD)[0] == 200
        assert client.ask("GET", "/livez")[0] == 200


def test_requests_are_logged_if_asked_for_and_keep_their_ids(folder: Path, caplog: Any) -> None:
    caplog.set_level("INFO", "cowrec.trainer.serving.server")
    with serving_here(folder / "export", Limits(timeout_ms=1000 * DEADLINE), access_log=True) as (client, service):
        for sent, returned in ((b"a-1/2", "a-1/2"), (b"wrong id", None), (None, None)):
            (connection,) = connected(client, 1)
            header = b"X-Request-ID: %s\r\n" % sent if sent else b""
            connection.sendall(post(GOOD, headers=header))
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert (answer.status, answer.headers["X-Request-ID"]) == (200, returned)
            connection.close()
        service.batcher._compute = None  # type: ignore[assignment]  # a bug, which no request can provoke
        status, content = client.predict(GOOD)
        assert (status, "internal error; the log of the server shows it as request " in content["error"]) == (500, True)
    lines = [message for message in caplog.messages if "POST /predict" in message]
    assert re.fullmatch(r"127.0.0.1 POST /predict, request a-1/2: status 200, 1 samples, [0-9.]+ ms", lines[0])
    assert [": status 200" in line and "request -:" in line for line in lines[1:3]] == [True] * 2
    number = content["error"].rpartition(" ")[2]
    assert f"request {number} to predict failed" in caplog.messages
    assert f"request {number}: status 500" in lines[3]


def test_a_used_or_wrong_port_and_a_folder_that_is_not_an_export_are_reported(
    cowrec: Cowrec, folder: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        used = other.getsockname()[1]
        busy = f"cannot listen on 127.0.0.1:{used}: Address already in use"
        for export, port, message in (
            (folder / "export", used, busy),
            (tmp_path, free_port(), str(tmp_path)),
        ):
            code, _, error = cowrec("serve", export, "--port", str(port))
            assert (code, f"cowrec: error: {message}" in error) == (2, True), error
    refused("scheme 'ftp' is not supported", Service, folder / "export", "ftp://x")


def test_waiting_calls_are_computed_together() -> None:
    """Five calls arrive while the first is computed: the next batches contain them, and each gets its own results."""
    batches: list[list[int]] = []

    async def calls() -> list[Any]:
        later: list[asyncio.Future[Any]] = []

        def compute(items: Any) -> list[int]:
            batches.append(list(items))
            if not later:
                later.extend(batcher.submit([item, item]) for item in range(1, 6))
            return [10 * item for item in items]

        batcher = MicroBatcher(compute, 7)
        first = await batcher.submit([0])
        return [first, *await asyncio.gather(*later)]

    assert asyncio.run(calls()) == [[0], *([10 * item, 10 * item] for item in range(1, 6))]
    # At most seven items: three calls of two, then the other two.
    assert batches == [[0], [1, 1, 2, 2, 3, 3], [4, 4, 5, 5]]


def test_a_failing_batch_fails_only_its_own_calls_and_a_late_call_is_not_computed() -> None:
    computed: list[int] = []

    def compute(items: Any) -> list[int]:
        if 0 in items:
            raise ValueError("zero")
        computed.extend(items)
        return list(items)

    async def calls() -> list[Any]:
        batcher = MicroBatcher(compute, 4)
        with pytest.raises(ValueError, match="zero"):
            await batcher.submit([0])
        together = await asyncio.gather(*(batcher.submit([item]) for item in (3, 0, 4)), return_exceptions=True)
        assert (together[0], repr(together[1]), together[2]) == ([3], "ValueError('zero')", [4])
        waiting = [batcher.submit([item], due) for item, due in ((1, math.inf), (2, 0.0))]
        return await asyncio.gather(*waiting, return_exceptions=True)

    one, other = asyncio.run(calls())
    assert (one, type(other), computed) == ([1], Late, [3, 4, 1])


Limited = tuple[Client, Service]


def post(body: Any, path: str = "/predict", headers: bytes = b"") -> bytes:
    """A request with a JSON body."""
    content = json.dumps(body).encode()
    head = b"POST %s HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n"
    return head % (path.encode(), headers, len(content)) + content


def connected(server: Client, count: int) -> list[socket.socket]:
    return [socket.create_connection(("127.0.0.1", server.port), timeout=600) for _ in range(count)]


@pytest.fixture(scope="module")
def limited() -> Iterator[Limited]:
    limits = Limits(timeout_ms=1000 * DEADLINE, concurrent_requests=4, request_seconds=DEADLINE, connections=40)
    with serving_here(served_folder() / "export", limits) as found:
        yield found


def answer_of(connection: socket.socket) -> tuple[int, bool, bool, str]:
    """Status of an answer, whether it says when to try again, whether the connection closes, and its error."""
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer.status, "Retry-After" in answer.headers, answer.will_close, json.loads(answer.read()).get("error", "")


def at_once(limited: Limited, requests: list[tuple[socket.socket, bytes]]) -> Counter[tuple[int, bool, bool, str]]:
    """Answers to requests that arrive while the server computes another one."""
    client, service = limited
    computing, sent, compute = threading.Event(), threading.Event(), service.batcher._compute

    def slowly(samples: list) -> object:
        computing.set()
        assert sent.wait(600)
        return compute(samples)

    service.batcher._compute = slowly
    first = threading.Thread(target=client.predict, args=(GOOD,))
    first.start()
    assert computing.wait(600)
    service.batcher._compute = compute
    for connection, content in requests:
        connection.sendall(content)
    sent.set()
    first.join()
    return Counter(answer_of(connection) for connection, _ in requests)


def test_requests_beyond_the_concurrency_limit_are_refused(limited: Limited) -> None:
    """Of six that arrive at once four have a slot; those refused are served on the same connections later."""
    connections = connected(limited[0], 6)
    busy = "4 requests are in progress, which is the limit; retry later"
    answers = at_once(limited, [(connection, post(GOOD)) for connection in connections])
    assert answers == {(200, False, False, ""): 4, (503, True, False, busy): 2}
    assert limited[0].metrics()["cowrec_rejected_requests_total{reason=busy}"] == 2
    for connection in connections:
        connection.sendall(post(GOOD))
        assert answer_of(connection)[0] == 200
        connection.close()


def test_a_connection_beyond_the_limit_is_refused_alone_and_silent_ones_are_closed(folder: Path) -> None:
    """Those opened before it are served, and health is always answered."""
    limits = Limits(timeout_ms=1000 * DEADLINE, connections=4, idle_seconds=DEADLINE)
    with serving_here(folder / "export", limits) as (client, service):
        first, *others = connected(client, 4)
        wait_for(lambda: client.metrics()["cowrec_open_connections"] == 5)
        for connection in connected(client, 1):
            connection.sendall(post(GOOD))
            refusal = "4 connections are open, which is the limit; retry later"
            assert answer_of(connection) == (503, True, True, refusal)
            connection.close()
        for path in ("/livez", "/readyz", "/metrics"):
            assert client.ask("GET", path)[0] == 200
        first.sendall(post(GOOD))
        assert answer_of(first)[0] == 200
        assert client.metrics()["cowrec_rejected_requests_total{reason=connections}"] == 1
        for other in (first, *others):
            other.close()
        service.limits = replace(limits, idle_seconds=0.1)
        (silent,) = connected(client, 1)
        assert silent.recv(1) == b""
        silent.close()
        assert client.predict(GOOD)[0] == 200


def test_connections_far_beyond_the_limit_are_closed_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cowrec.trainer.serving.connections.SPARE", 2)
    with serving_here(folder / "export", Limits(connections=1)) as (client, _):
        kept = connected(client, 3)
        wait_for(lambda: _is_closed(client))
        assert not _has_ended(kept[0])
        for connection in kept:
            connection.close()
        wait_for(lambda: client.metrics()["cowrec_open_connections"] == 1)


def _is_closed(client: Client) -> bool:
    """Whether a new connection is closed at once."""
    (connection,) = connected(client, 1)
    with connection:
        return _has_ended(connection)


def _has_ended(connection: socket.socket) -> bool:
    connection.settimeout(0.1)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_headers_that_are_too_large_or_too_slow_end_their_connection(folder: Path) -> None:
    with serving_here(folder / "export", Limits(request_seconds=0.5, header_bytes=2000)) as (client, _):
        large, slow, wrong = connected(client, 3)
        large.sendall(b"GET /livez HTTP/1.1\r\nA: " + b"a" * 3000)
        assert large.recv(1000).startswith(b"HTTP/1.1 431 ")
        wrong.sendall(b"no HTTP\r\n\r\n")
        assert wrong.recv(1000).startswith(b"HTTP/1.1 400 ")
        slow.sendall(b"GET /livez HTTP/1.1\r\n")
        assert slow.recv(1000) == b""
        metrics = client.metrics()
        assert [metrics[f"cowrec_rejected_requests_total{{reason={name}}}"] for name in ("headers", "bad_http")] == [
            1,
            1,
        ]
        for connection in (large, slow, wrong):
            connection.close()


def test_requests_that_are_late_are_refused(limited: Limited) -> None:
    """Two arrive while another one is computed, due in a microsecond."""
    client, request = limited[0], post(GOOD, "/predict?timeout_ms=0.001")
    connections = connected(client, 2)
    late = "no prediction could be made within 0.001 ms; retry later"
    assert at_once(limited, [(opened, request) for opened in connections]) == {(503, True, False, late): 2}
    assert client.metrics()["cowrec_rejected_requests_total{reason=late}"] == 2
    for connection in connections:
        connection.close()
    status, answer = client.ask("POST", "/predict?timeout_ms=soon", GOOD)
    assert (status, "timeout_ms must be a number above 0, got 'soon'" in answer["error"]) == (400, True)
    assert client.ask("POST", "/predict?timeout_ms=1e9", GOOD)[0] == 200


def everything(export: Path, step: int, sample_time: int | None = None) -> Change:
    """A complete model, as a trainer publishes it."""
    rows = {file.stem: load_file(file)["rows"].numpy() for file in sorted((export / "tables").iterdir())}
    tables = {name: TableChange(np.arange(len(row)), row) for name, row in rows.items()}
    dense = {name: tensor.numpy() for name, tensor in load_file(export / "dense.safetensors").items()}
    return Change(step, sample_time, tables, dense)


def publisher_to(url: str, folder: Path) -> contextlib.closing[Publisher]:
    """A trainer's publisher, of the data and network of a folder's export."""
    return contextlib.closing(Publisher(open_target(url, publishing=True), fingerprint_of(folder)))


def fingerprint_of(folder: Path) -> str:
    manifest = Manifest.load(folder / "export")
    return fingerprint(folder / "export", manifest.model, manifest.tables)


def published(publisher: Publisher, change: Change) -> int:
    """Publishes a complete model as the next version, again if the target failed meanwhile; returns its number."""
    publisher.publish(change, change)
    deadline = time.monotonic() + DEADLINE
    while not publisher.finish(2):
        assert time.monotonic() < deadline, publisher.counters()
        if publisher.counters()["pending_rows"]:  # none while a version is being written, which this would follow
            publisher.publish(change, change)
    version: int = publisher.counters()["version"]
    return version


def answers_as(server: Client, folder: Path, name: str, version: int) -> None:
    """Compares predictions, with the tolerance of those above."""
    status, answer = server.predict(raw_samples(folder))
    assert (status, answer["version"]) == (200, version)
    np.testing.assert_allclose(answer["probabilities"], predictions(folder, name), atol=1e-6)


def test_published_versions_are_served(tmp_path: Path) -> None:
    """Covers a directory that is created later, and a server that was killed and restarted.

    The server is ready from the first version on, and no longer when that is too old.
    """
    folder = with_longer_run()
    target = tmp_path / "published"
    with serving(folder / "export", "--follow", str(target), status="waiting") as server:
        assert server.ask("GET", "/livez")[0] == 200
        wait_for(lambda: f"{target} has no version yet; check --follow" in server.health()["problem"])
        assert server.ask("GET", "/readyz")[0] == 503
        status, answer = server.predict(raw_samples(folder))
        assert (status, "have not been applied yet" in answer["error"]) == (503, True), answer
        assert server.metrics()["cowrec_ready"] == 0
        with publisher_to(str(target), folder) as publisher:
            now = int(time.time())
            version = published(publisher, everything(folder / "longer-export", 10, now - 1000))
            health = server.wait_for("version", version)
            assert (health["step"], health["sample_time"]) == (10, now - 1000)
            server.wait_for("status", "ok")
            answers_as(server, folder, "longer", version)
            metrics = server.metrics()
            assert metrics["cowrec_deltas_applied_total"] >= 1
            assert metrics["cowrec_model_version"] == version
            assert 1000 <= metrics["cowrec_model_age_seconds"] < 1000 + 60
            assert 0 <= metrics["cowrec_last_delta_age_seconds"] < 60
            assert metrics["cowrec_following"] == metrics["cowrec_ready"] == 1
            assert server.ask("GET", "/readyz")[0] == 200
            back = published(publisher, everything(folder / "export", 5))
            server.wait_for("version", back)
            answers_as(server, folder, "run", back)
        code, printed = server.send(signal.SIGKILL)
        assert code == -signal.SIGKILL
        assert re.search(rf"cowrec: version \d+ \(full, step 10\) of {re.escape(str(target))} is served\n", printed)
    old = ("--follow", str(target), "--max-age", "0.1")
    with serving(folder / "longer-export", *old, port=server.port, status="degraded") as server:
        status, answer = server.ask("GET", "/readyz")
        assert (status, "--max-age is 0.1" in answer["problem"]) == (503, True), answer
        answers_as(server, folder, "run", back)


@pytest.mark.thorough
def test_a_target_that_fails_only_delays_versions(tmp_path: Path) -> None:
    """Redis is killed and restarted, empty: the last applied version is served, and later ones are applied.

    Its password is neither shown nor logged.
    """
    folder = with_longer_run()
    with (
        redis_server(tmp_path / "redis", password="hush-hush") as redis,
        serving(folder / "export", "--follow", redis.url, status="waiting") as server,
        publisher_to(redis.url, folder) as publisher,
    ):
        version = published(publisher, everything(folder / "longer-export", 10))
        server.wait_for("version", version)
        redis.send(signal.SIGKILL)
        health = server.wait_for("status", "degraded")
        shown = f"redis://***@127.0.0.1:{redis.port}/0"
        assert f"{shown} cannot be reached" in health["problem"]
        assert "hush" not in str([health, server.ask("GET", "/metrics")])
        assert server.ask("GET", "/readyz")[0] == 200
        assert server.metrics()["cowrec_following"] == 0
        answers_as(server, folder, "longer", version)
        redis.start()
        wait_for(lambda: f"{shown} has lost its versions; check it" in server.health()["problem"])
        assert server.ask("GET", "/readyz")[0] == 200
        answers_as(server, folder, "longer", version)
        later = published(publisher, everything(folder / "export", 5))
        server.wait_for("version", later)
        server.wait_for("status", "ok")
        answers_as(server, folder, "run", later)
        printed = server.send(signal.SIGTERM)[1]
        assert printed.count("cannot be reached") == printed.count(f"{shown} is followed again") == 1, printed
        assert "hush" not in printed


def test_servers_go_back_to_a_version_that_is_published_again(cowrec: Cowrec, tmp_path: Path) -> None:
    """A running server goes on with the trainer's next version."""
    folder = with_longer_run()
    target = tmp_path / "published"
    good, bad = everything(folder / "export", 5), everything(folder / "longer-export", 10)
    with serving(folder / "export", "--follow", str(target), status="waiting") as server:
        with publisher_to(str(target), folder) as publisher:
            assert (published(publisher, good), published(publisher, bad)) == (1, 2)
            server.wait_for("version", 2)
            code, _, error = cowrec("versions", target, "--republish", "1")
            assert (code, "another process is at work" in error) == (2, True)
        answers_as(server, folder, "longer", 2)
        code, printed, _ = cowrec("versions", target, "--republish", "1")
        assert (code, printed.startswith("version 1 is published again as version 3")) == (0, True)
        assert (server.wait_for("version", 3)["step"], server.health()["status"]) == (5, "ok")
        answers_as(server, folder, "run", 3)
        code, listed, _ = cowrec("versions", target)
        rows = [" ".join(line.split()[:3]) for line in listed.splitlines()[1:]]
        assert (code, rows) == (0, ["1 full 5", "2 delta 10", "3 full 5"])
        with publisher_to(str(target), folder) as publisher:
            assert published(publisher, bad) == 4
        server.wait_for("version", 4)
        answers_as(server, folder, "longer", 4)
    code, _, error = cowrec("versions", target, "--republish", "9")
    assert (code, "choose one of 3, 4" in error) == (2, True)
