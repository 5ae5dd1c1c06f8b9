"""The examples of scripts/deploy: Kubernetes' schema accepts them, commands exist, and nginx forwards requests."""

import json
import re
import shutil
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from prometheus_client.parser import text_string_to_metric_families

from cowrec.data_pipeline.streams.position import COUNTERS as STREAM_COUNTERS
from cowrec.trainer.cli.main import app
from cowrec.trainer.online.measurements import COUNTERS, GAUGES, STREAM
from cowrec.trainer.serving.metrics import ServiceMetrics
from serving import GOOD, serving, trained_and_exported
from trainer_cases import free_port

DEPLOY = Path(__file__).resolve().parents[2] / "scripts" / "deploy"


def resources() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def test_the_kubernetes_example_follows_its_schema() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for resource in resources():
        kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)


def test_the_commands_of_the_kubernetes_example_exist() -> None:
    pods = [each["spec"]["template"]["spec"] for each in resources() if "template" in each.get("spec", {})]
    containers = [container for pod in pods for container in pod["containers"] if container["image"] == "cowrec:latest"]
    commands: Any = typer.main.get_command(app)
    assert [container["args"][0] for container in containers] == ["online", "serve"]
    for container in containers:
        name, *arguments = container["args"]
        commands.commands[name].make_context(name, arguments)  # parses them


def test_labels_ports_volumes_and_claims_of_the_kubernetes_example_match() -> None:
    found = resources()
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in found if "template" in each["spec"]]
    for each in found:
        selector = each["spec"].get("selector")
        if selector:
            assert selector.get("matchLabels", selector) in labels
    for each in found:
        pod = each["spec"].get("template", {}).get("spec", {})
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        volumes |= {claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", [])}
        for container in pod.get("containers", []):
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_dashboard_and_alerts_use_metrics_that_exist() -> None:
    """A counter `x` is exposed as `x_total`, a histogram as `x_bucket` and `x_count`."""
    exposed = {f"cowrec_online_{name}" for name in GAUGES} | {f"cowrec_online_{name}_total" for name in COUNTERS}
    exposed.add(f"{STREAM}_total")
    for family in text_string_to_metric_families(ServiceMetrics(dict).text().decode()):
        endings = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(family.type, ("",))
        exposed |= {family.name + ending for ending in endings}
    for name in ("alerts.yaml", "grafana.json"):
        used = set(re.findall(r"\bcowrec_\w+", (DEPLOY / name).read_text()))
        assert len(used) > 5
        assert used <= exposed
    for kinds in re.findall(r'kind=~?."?([a-z|]+)', (DEPLOY / "alerts.yaml").read_text()):
        assert set(kinds.split("|")) <= set(STREAM_COUNTERS)


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool, of Prometheus")
def test_prometheus_accepts_the_alert_rules() -> None:
    command = ["promtool", "check", "rules", str(DEPLOY / "alerts.yaml")]
    checked = subprocess.run(command, check=False, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.skipif(not (shutil.which("nginx") and shutil.which("openssl")), reason="needs nginx and openssl")
def test_nginx_forwards_predictions_over_tls_to_clients_with_a_token(tmp_path: Path) -> None:
    trained_and_exported(tmp_path)
    certificate, key, tokens = (tmp_path / name for name in ("certificate.pem", "key.pem", "tokens.conf"))
    create = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    alternative = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*create, *alternative], check=True, capture_output=True)
    tokens.write_text('"Bearer secret" 1;\n')
    with serving(tmp_path / "export") as server:
        port = free_port()
        text = (DEPLOY / "nginx.conf").read_text()
        for old, new in {
            "127.0.0.1:8000": f"127.0.0.1:{server.port}",
            "listen 443": f"listen 127.0.0.1:{port}",
            "/etc/cowrec/": f"{tmp_path}/",
            "/run/nginx-cowrec.pid": f"{tmp_path}/nginx.pid",
        }.items():
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "nginx.conf").write_text(text)
        nginx = subprocess.Popen(["nginx", "-c", str(tmp_path / "nginx.conf"), "-g", "daemon off;"])
        try:
            deadline = time.monotonic() + 30
            while not (tmp_path / "nginx.pid").exists():
                assert nginx.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            trust = ssl.create_default_context(cafile=str(certificate))

            def ask(path: str, token: str) -> tuple[int, bytes]:
                body = json.dumps(GOOD).encode() if path == "/predict" else None
                request = urllib.request.Request(f"https://localhost:{port}{path}", body)
                request.add_header("Authorization", token)
                try:
                    with urllib.request.urlopen(request, context=trust, timeout=30) as answer:
                        return answer.status, answer.read()
                except urllib.error.HTTPError as error:
                    return error.code, error.read()

            status, answer = ask("/predict", "Bearer secret")
            assert (status, json.loads(answer)) == server.predict(GOOD)
            assert ask("/predict", "Bearer guess")[0] == 401
            assert [ask(path, "Bearer secret")[0] for path in ("/metrics", "/health", "/predict/")] == [404, 404, 404]
        finally:
            nginx.terminate()
            nginx.wait(30)
