"""The examples of scripts/deploy: alerts name metrics that exist."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cowrec.data_pipeline.streams.position import COUNTERS as STREAM_COUNTERS
from cowrec.trainer.online.measurements import COUNTERS, GAUGES, LABELLED
from cowrec.trainer.serving.metrics import ServiceMetrics

DEPLOY = Path(__file__).resolve().parents[2] / "scripts" / "deploy"


def test_alerts_use_metrics_that_exist() -> None:
    """A counter `x` is exposed as `x_total`, a histogram as `x_bucket` and `x_count`."""
    exposed = {f"cowrec_online_{name}" for name in GAUGES} | {f"cowrec_online_{name}_total" for name in COUNTERS}
    exposed |= {f"cowrec_online_{name}" + "_total" * (not name.endswith("share")) for name in LABELLED}
    for family in text_string_to_metric_families(ServiceMetrics(dict, dict).text().decode()):
        endings = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(family.type, ("",))
        exposed |= {family.name + ending for ending in endings}
    used = set(re.findall(r"\bcowrec_\w+", (DEPLOY / "alerts.yaml").read_text()))
    assert len(used) > 5
    assert used <= exposed
    for kinds in re.findall(r'kind=~?."?([a-z_|]+)', (DEPLOY / "alerts.yaml").read_text()):
        assert set(kinds.split("|")) <= {*STREAM_COUNTERS, "late_files", "damaged_files"}


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
