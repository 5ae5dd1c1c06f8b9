"""The examples of scripts/deploy: alerts name metrics that exist, and nginx protects a server."""

import json
import re
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cowrec.data_pipeline.streams.position import COUNTERS as STREAM_COUNTERS
from cowrec.trainer.online.measurements import COUNTERS, GAUGES, STREAM
from cowrec.trainer.serving.metrics import ServiceMetrics
from serving import GOOD, Serving, served_folder, serving
from trainer_cases import free_port

DEPLOY = Path(__file__).resolve().parents[2] / "scripts" / "deploy"


def test_alerts_use_metrics_that_exist() -> None:
    """A counter `x` is exposed as `x_total`, a histogram as `x_bucket` and `x_count`."""
    exposed = {f"cowrec_online_{name}" for name in GAUGES} | {f"cowrec_online_{name}_total" for name in COUNTERS}
    exposed.add(f"{STREAM}_total")
    for family in text_string_to_metric_families(ServiceMetrics(dict).text().decode()):
        endings = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(family.type, ("",))
        exposed |= {family.name + ending for ending in endings}
    used = set(re.findall(r"\bcowrec_\w+", (DEPLOY / "alerts.yaml").read_text()))
    assert len(used) > 5
    assert used <= exposed
    for kinds in re.findall(r'kind=~?."?([a-z|]+)', (DEPLOY / "alerts.yaml").read_text()):
        assert set(kinds.split("|")) <= set(STREAM_COUNTERS)


def test_alerts_compare_series_that_have_the_same_labels() -> None:
    """Otherwise Prometheus finds no pair, and no alert ever fires: only the counts of samples have a kind."""
    rules = (" ".join(each.split()) for each in (DEPLOY / "alerts.yaml").read_text().split("expr: ")[1:])
    expressions = (each.removeprefix(">- ").partition(" for: ")[0].partition(" labels: ")[0] for each in rules)
    pairs = [each.split(" and ") for each in expressions if " and " in each]
    assert len(pairs) >= 2
    for one, other in pairs:
        differ = ("{kind=" in one) != ("{kind=" in other)
        assert other.startswith("ignoring(kind) ") == differ, (one, other)


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool, of Prometheus")
def test_prometheus_accepts_the_alert_rules() -> None:
    command = ["promtool", "check", "rules", str(DEPLOY / "alerts.yaml")]
    checked = subprocess.run(command, check=False, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[tuple[Serving, int, ssl.SSLContext]]:
    """A server, and the port of nginx in front of it, with a second in place of ten and four connections of 256."""
    certificate, key, tokens = (tmp_path / name for name in ("certificate.pem", "key.pem", "tokens.conf"))
    create = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    alternative = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*create, *alternative], check=True, capture_output=True)
    tokens.write_text('"~^Bearer secret$" 1;\n')
    with serving(served_folder() / "export") as server:
        port = free_port()
        text = (DEPLOY / "nginx.conf").read_text()
        for old, new in {
            "127.0.0.1:8000": f"127.0.0.1:{server.port}",
            "listen 443": f"listen 127.0.0.1:{port}",
            "/etc/cowrec/": f"{tmp_path}/",
            "/run/nginx-cowrec.pid": f"{tmp_path}/nginx.pid",
            "_timeout 10s": "_timeout 1s",
            "clients 256": "clients 4",
        }.items():
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "nginx.conf").write_text(text)
        nginx = subprocess.Popen(["nginx", "-c", str(tmp_path / "nginx.conf"), "-g", "daemon off;"])
        try:
            deadline = time.monotonic() + 600
            while not (tmp_path / "nginx.pid").exists():
                assert nginx.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            yield server, port, ssl.create_default_context(cafile=str(certificate))
        finally:
            nginx.terminate()
            nginx.wait(30)


@pytest.mark.skipif(not (shutil.which("nginx") and shutil.which("openssl")), reason="needs nginx and openssl")
def test_nginx_protects_a_server(proxied: tuple[Serving, int, ssl.SSLContext]) -> None:
    """It forwards predictions over TLS to clients with a token, and keeps slow and wrong ones to itself."""
    server, port, trust = proxied
    body = json.dumps(GOOD).encode()

    def ask(path: str, token: str = "secret", sent: bytes = body, **headers: str) -> tuple[int, bytes]:
        request = urllib.request.Request(f"https://localhost:{port}{path}", sent if path == "/predict" else None)
        for name, value in {"Authorization": f"Bearer {token}", **headers}.items():
            request.add_header(name, value)
        try:
            with urllib.request.urlopen(request, context=trust, timeout=30) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def begun(head: bytes) -> ssl.SSLSocket:
        client = trust.wrap_socket(socket.create_connection(("localhost", port), 30), server_hostname="localhost")
        client.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n" + head)
        return client

    status, answer = ask("/predict")
    assert (status, json.loads(answer)) == server.predict(GOOD)
    assert [ask("/predict", token)[0] for token in ("guess", "Secret", "secrets")] == [401] * 3
    assert [ask(path)[0] for path in ("/metrics", "/readyz", "/predict/")] == [404, 404, 404]
    assert ask("/predict", sent=b"{")[0] == 400
    assert ask("/predict", sent=b" " * (2 << 20))[0] == 413
    assert ask("/predict", Filler="x" * 40_000)[0] == 400
    assert ask("/predict", Connection="Upgrade", Upgrade="h2c")[0] == 200  # as Java's client
    before = server.metrics()
    held = [begun(b"Content-Length: 10\r\n\r\n{") for _ in range(4)] + [begun(b"X-Half") for _ in range(4)]
    deadline = time.monotonic() + 600
    while ask("/predict")[0] != 503:  # these are all connections of one address
        assert time.monotonic() < deadline
    assert server.predict(GOOD)[0] == 200
    assert [client.recv(100) for client in held] == [b""] * 8
    for client in held:
        client.close()
    assert ask("/predict")[0] == 200
    after = server.metrics()
    statuses = [f"cowrec_request_seconds_count{{route=/predict,status={status}}}" for status in (400, 408)]
    assert [after.get(each) for each in statuses] == [before.get(each) for each in statuses]
