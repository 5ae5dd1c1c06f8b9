"""The examples of scripts/deploy: metrics exist, rules and dashboard are valid, units and manifests are accepted."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml
from prometheus_client.parser import text_string_to_metric_families

from cowrec.data_pipeline.streams.position import COUNTERS as STREAM_COUNTERS
from cowrec.trainer.cli.main import app
from cowrec.trainer.online.measurements import COUNTERS, GAUGES, LABELLED
from cowrec.trainer.serving.metrics import ServiceMetrics

DEPLOY = Path(__file__).resolve().parents[2] / "scripts" / "deploy"
UNITS = sorted((DEPLOY / "systemd").iterdir())
OF_SOURCES = {"late_files", "damaged_files", "reconnects", "gaps"}


def expressions() -> list[str]:
    """Those of the alerts and of the dashboard."""
    groups = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    panels = json.loads((DEPLOY / "dashboard.json").read_text())["panels"]
    alerts = [rule["expr"] for group in groups for rule in group["rules"]]
    return alerts + [target["expr"] for panel in panels for target in panel["targets"]]


def test_alerts_and_dashboard_use_metrics_that_exist() -> None:
    """A counter `x` is exposed as `x_total`, a histogram as `x_bucket` and `x_count`."""
    exposed = {f"cowrec_online_{name}" for name in GAUGES} | {f"cowrec_online_{name}_total" for name in COUNTERS}
    exposed |= {f"cowrec_online_{name}" + "_total" * (not name.endswith("share")) for name in LABELLED}
    for family in text_string_to_metric_families(ServiceMetrics(dict, dict).text().decode()):
        endings = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(family.type, ("",))
        exposed |= {family.name + ending for ending in endings} | {sample.name for sample in family.samples}
    text = "\n".join(expressions())
    used = set(re.findall(r"\b(?:cowrec|process)_\w+", text))
    assert len(used) > 25
    assert used <= exposed
    for kinds in re.findall(r'kind=~?"([a-z_|]+)', text):
        assert set(kinds.split("|")) <= {*STREAM_COUNTERS, *OF_SOURCES}


def test_the_documents_say_what_each_alert_means() -> None:
    groups = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    text = (DEPLOY.parents[1] / "docs" / "online.md").read_text()
    assert set(re.findall(r"`(Cowrec\w+)`", text)) == {rule["alert"] for group in groups for rule in group["rules"]}


def test_alerts_compare_series_that_have_the_same_labels() -> None:
    """Otherwise Prometheus finds no pair, and no alert ever fires: only the counts of samples have a kind."""
    pairs = [
        expression.split(" and ")
        for expression in expressions()
        if " and " in expression and " and on(" not in expression
    ]
    assert len(pairs) >= 3
    for one, other in pairs:
        differ = ("{kind=" in one) != ("{kind=" in other)
        assert other.startswith("ignoring(kind) ") == differ, (one, other)


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool, of Prometheus")
def test_prometheus_accepts_alerts_and_dashboard(tmp_path: Path) -> None:
    rules = [{"record": f"each:{number}", "expr": expression} for number, expression in enumerate(expressions())]
    (tmp_path / "all.yaml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    command = ["promtool", "check", "rules", str(DEPLOY / "alerts.yaml"), str(tmp_path / "all.yaml")]
    checked = subprocess.run(command, check=False, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool, of Prometheus")
def test_alerts_fire_for_what_they_are_for(tmp_path: Path) -> None:
    """After fifty minutes: one field is missing, samples are malformed, snapshots fail, a server follows nothing."""
    online, trainer = "cowrec_online_", 'instance="trainer", job="cowrec"'
    series = {
        f'{online}stream_samples_total{{kind="samples", {trainer}}}': "0+100x60",
        f'{online}stream_samples_total{{kind="malformed", {trainer}}}': "0+5x60",
        f'{online}missing_values_total{{field="C1", {trainer}}}': "0+60x60",
        f'{online}missing_values_total{{field="C2", {trainer}}}': "0+12x60",
        f'{online}usual_missing_share{{field="C1", {trainer}}}': "0.1+0x60",
        f'{online}usual_missing_share{{field="C2", {trainer}}}': "0.1+0x60",
        f"{online}steps_total{{{trainer}}}": "0+10x60",
        f"{online}lag_seconds{{{trainer}}}": "2000+0x60",
        f"{online}seconds_since_snapshot{{{trainer}}}": "0+60x60",
        f"{online}seconds_since_publication{{{trainer}}}": "5+0x60",
        f"{online}snapshot_failures_total{{{trainer}}}": "0+1x60",
        'cowrec_following{instance="server"}': "0+0x60",
        'cowrec_following{instance="without"}': "NaN+0x60",
        'cowrec_rejected_requests_total{instance="server", reason="connections"}': "0+1x60",
    }
    expected = (
        "TrainerBehind SamplesLeftOut ValuesMissing SnapshotsFail NoSnapshot ServerFollowsNothing ConnectionsRefused"
    )
    samples = [{"labels": f'{{alertname="Cowrec{name}"}}', "value": 1} for name in expected.split()]
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": "50m",
                "exp_samples": samples,
            }
        ],
    }
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(DEPLOY / "alerts.yaml")], "tests": [case]}))
    checked = subprocess.run(["promtool", "test", "rules", str(file)], check=False, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for unit in UNITS:  # the program is not installed here
        (tmp_path / unit.name).write_text(unit.read_text().replace("/opt/cowrec/bin/cowrec", sys.executable))
    command = ["systemd-analyze", "verify", *(str(tmp_path / unit.name) for unit in UNITS)]
    checked = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_units_and_manifests_use_flags_that_exist() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    commands = group.commands
    used = [unit.read_text().split("ExecStart=")[1].replace("\\\n", " ").split("\n")[0].split()[1:] for unit in UNITS]
    for manifest in manifests():
        for container in manifest.get("spec", {}).get("template", {}).get("spec", {}).get("containers", []):
            used.append(container["args"])
    assert len(used) == 4
    for name, *arguments in used:
        known = {flag for parameter in commands[name].params for flag in parameter.opts}
        assert {argument.partition("=")[0] for argument in arguments if argument.startswith("--")} <= known


def manifests() -> list[dict]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def test_kubernetes_accepts_the_manifests() -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    for manifest in manifests():
        validate(manifest, "1.30", strict=True)


def test_probes_name_ports_of_their_containers() -> None:
    pods = [manifest["spec"]["template"]["spec"] for manifest in manifests() if "template" in manifest.get("spec", {})]
    assert len(pods) == 2
    for pod in pods:
        (container,) = pod["containers"]
        ports, volumes = {port["name"] for port in container["ports"]}, {volume["name"] for volume in pod["volumes"]}
        probes = [value for key, value in container.items() if key.endswith("Probe")]
        assert probes
        assert {probe["httpGet"]["port"] for probe in probes} <= ports
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
