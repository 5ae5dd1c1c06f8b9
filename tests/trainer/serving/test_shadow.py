"""A shadow predicts what the server answers, in a process of its own that can be killed, stopped, or flooded."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import log_loss, roc_auc_score
from typer.testing import CliRunner

from cowrec.data_pipeline import SampleCodec
from cowrec.data_pipeline.rotated_file import earlier
from cowrec.trainer.cli.main import app
from cowrec.trainer.export.export import export_run
from cowrec.trainer.serving.served_model import ServedModel
from cowrec.trainer.serving.shadow.log import ShadowLog, compare
from serving import DEADLINE, GOOD, Serving, predictions, raw_samples, serving, trained_and_exported

QUEUE = "cowrec_shadow_dropped_requests_total{reason=queue}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shadow")
    trained_and_exported(folder)
    export_run(folder / "run", folder / "int8", "int8")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Serving]:
    options = ("--shadow", str(folder / "int8"), "--shadow-log", str(folder / "log" / "shadow.jsonl"))
    with serving(folder / "export", *options) as server:
        wait_until(lambda: server.metrics().get("cowrec_shadow_running") == 1)
        yield server


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def logged(folder: Path) -> list[dict]:
    path = folder / "log" / "shadow.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def child_of(server: Serving) -> int:
    """Process of the shadow: the child that is not multiprocessing's resource tracker."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    (found,) = [each for each in children if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()]
    return int(found)


def test_both_predictions_are_counted_and_logged(server: Serving, folder: Path) -> None:
    """Of all samples of a large request, which is sent in parts, and of single ones; both as if served alone."""
    samples = [{**each, "sample_id": number} for number, each in enumerate(raw_samples(folder))]
    many = samples * (1000 // len(samples))
    status, answer = server.predict(many)
    assert status == 200
    assert len(json.dumps(many)) > 48 << 10
    assert server.predict(samples[3])[0] == 200
    assert server.predict({"price": 3})[0] == 400  # no prediction, nothing to compare
    wait_until(lambda: len(logged(folder)) == len(many) + 1)
    lines = logged(folder)
    np.testing.assert_array_equal([each["served"] for each in lines[:-1]], answer["probabilities"])
    codec = SampleCodec.load(folder / "int8")
    block, bad = codec.encode_request(many)
    assert not bad
    shadow = ServedModel.load(folder / "int8").predict(block)
    np.testing.assert_allclose([each["shadow"] for each in lines[:-1]], shadow, atol=1e-6)
    assert [each["sample_id"] for each in lines] == [each["sample_id"] for each in [*many, samples[3]]]
    assert {(each["served_version"], each["shadow_version"]) for each in lines} == {(0, 0)}
    wait_until(lambda: server.metrics()["cowrec_shadow_predictions_total"] == len(lines))
    metrics = server.metrics()
    served, shadow = (np.array([each[name] for each in lines]) for name in ("served", "shadow"))
    np.testing.assert_allclose(metrics["cowrec_shadow_prediction_sum_total{model=served}"], served.sum())
    np.testing.assert_allclose(metrics["cowrec_shadow_prediction_sum_total{model=shadow}"], shadow.sum())
    np.testing.assert_allclose(metrics["cowrec_shadow_absolute_difference_sum"], np.abs(served - shadow).sum())
    assert metrics["cowrec_shadow_ready"] == 1


def test_the_log_is_joined_with_labels(server: Serving, folder: Path) -> None:
    rng = np.random.default_rng(0)
    samples = [{**each, "sample_id": f"s{number}"} for number, each in enumerate(raw_samples(folder))]
    before = len(logged(folder))
    assert server.predict(samples)[0] == 200
    wait_until(lambda: len(logged(folder)) == before + len(samples))
    label = rng.integers(0, 2, len(samples))
    names = [each["sample_id"] for each in samples]
    table = pa.table({"sample_id": [*names, "unseen"], "click": [*label.tolist(), 1]})
    pq.write_table(table, folder / "labels.parquet")
    pyarrow.csv.write_csv(table, folder / "labels.csv")
    log = folder / "log" / "shadow.jsonl"
    found = compare(log, folder / "labels.parquet", "click")
    lines = {each["sample_id"]: each for each in logged(folder)}
    for name, quality in found.items():
        predicted = np.array([lines[each][name] for each in names])
        assert quality.rows == len(names)
        np.testing.assert_allclose(quality.auc, roc_auc_score(label, predicted))
        np.testing.assert_allclose(quality.logloss, log_loss(label, predicted))
        np.testing.assert_allclose(quality.calibration, predicted.mean() / label.mean())
    assert compare(log, folder / "labels.csv", "click")["served"].auc == found["served"].auc
    arguments = ["shadow", str(log), "--labels", str(folder / "labels.csv"), "--label", "click"]
    printed = CliRunner().invoke(app, arguments, catch_exceptions=False).output
    assert [line.split()[:3] for line in printed.splitlines()[1:]] == [
        [name, str(len(names)), f"{found[name].auc:.4f}"] for name in ("served", "shadow")
    ]
    with pytest.raises(ValueError, match="has no column 'label', but sample_id, click"):
        compare(log, folder / "labels.csv", "label")
    pq.write_table(table.slice(len(names)), folder / "others.parquet")
    with pytest.raises(ValueError, match=r"has a label in .*; send the sample_id of each sample with its request"):
        compare(log, folder / "others.parquet", "click")


def test_a_stopped_or_killed_shadow_harms_no_answer(server: Serving, folder: Path) -> None:
    """Stopped, it leaves a full queue, from which requests are dropped; killed, everything is dropped."""
    expected, body = predictions(folder, "run"), raw_samples(folder)
    child = child_of(server)
    os.kill(child, signal.SIGSTOP)
    while QUEUE not in server.metrics():
        np.testing.assert_allclose(server.predict(body)[1]["probabilities"], expected, atol=1e-6)
    os.kill(child, signal.SIGCONT)
    before = server.metrics()["cowrec_shadow_predictions_total"]
    wait_until(lambda: server.metrics()["cowrec_shadow_predictions_total"] > before)
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: server.metrics()["cowrec_shadow_running"] == 0)
    for _ in range(3):
        np.testing.assert_allclose(server.predict(body)[1]["probabilities"], expected, atol=1e-6)
    assert server.metrics()["cowrec_shadow_dropped_requests_total{reason=ended}"] >= 3
    assert server.health()["status"] == "ok"
    assert "the shadow has ended; predictions are served without it" in server.send(signal.SIGTERM)[1]


def test_a_share_is_chosen_by_the_request_and_ends_with_the_server(folder: Path, tmp_path: Path) -> None:
    """The same request is always chosen or never. The shadow ends with a server that is killed, and one that cannot be
    loaded leaves its server as it is."""
    share = ("--shadow-share", "0.5", "--shadow-log", str(tmp_path / "log" / "shadow.jsonl"))
    other = Serving(folder / "export", "--shadow", str(tmp_path / "nothing"))
    with serving(folder / "export", "--shadow", str(folder / "int8"), *share) as server:
        wait_until(lambda: server.metrics().get("cowrec_shadow_running") == 1)
        for number in [*range(40), *range(40)]:
            assert server.predict({**GOOD, "sample_id": number})[0] == 200

        def each_twice() -> bool:
            chosen = [each["sample_id"] for each in logged(tmp_path)]
            return 10 <= len(set(chosen)) <= 30 and sorted(chosen) == sorted([*set(chosen)] * 2)

        wait_until(each_twice)
        child = child_of(server)
        server.send(signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{child}").exists())
    other.wait_for("status", "ok")
    assert other.process.stderr is not None
    said = iter(other.process.stderr.readline, "")
    assert any(f"shadow: {tmp_path / 'nothing'} cannot be served: " in line for line in said)
    assert other.predict(GOOD)[0] == 200
    assert other.send(signal.SIGTERM)[0] == 0


def test_the_log_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = ShadowLog(path, 10_000)
    for number in range(2000):
        log.write([{"sample_id": number, "served": 0.5}])
        assert path.stat().st_size + (earlier(path).stat().st_size if earlier(path).exists() else 0) <= 10_000
    kept = [json.loads(line)["sample_id"] for each in (earlier(path), path) for line in each.read_text().splitlines()]
    assert kept == list(range(kept[0], 2000))
    assert len(kept) > 100
