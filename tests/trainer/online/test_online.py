"""Online training: predictions before training, publications, resumed runs, batches set aside, drifting ids."""

import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from sklearn.metrics import log_loss, roc_auc_score

from cowrec.data_pipeline import SampleCodec
from cowrec.data_pipeline.synthetic.drifting import drifting_tables
from cowrec.trainer.config.run import load_config
from cowrec.trainer.export.export import export_run
from cowrec.trainer.online.loop import online
from cowrec.trainer.online.measurements import LABELLED, WINDOW_FILE, ProgressiveQuality, metrics_endpoint
from cowrec.trainer.publishing.blob import decode
from cowrec.trainer.publishing.target import Target, open_target
from cowrec.trainer.runtime.errors import NonFiniteLoss
from cowrec.trainer.serving.served_model import ServedModel
from cowrec.trainer.training.active_run import MOST_SET_ASIDE
from cowrec.trainer.training.trainer import train
from online_cases import DRIFT, SAMPLES, assert_readers_equal_an_export, followed, make_case, write_stream
from refusal import refused
from run_comparison import assert_close, assert_same, up_to_date, wait_for
from trained_runs import metrics, report_of, write_network
from trainer_cases import checkpoint, free_port, interrupted, make_data, tensors


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stream of twenty days, and ``short``, its first five."""
    folder = make_case(tmp_path_factory.mktemp("online"))
    write_stream(folder / "short", list(drifting_tables(DRIFT, 0, 1000, chunk_rows=500)))
    return folder


def run(case: Path, run_dir: Path, *overrides: str, source: Path | None = None, **given: Any) -> dict[str, Any]:
    config = load_config(case / "run.toml", overrides)
    return online(config, case / "data", str(source or case / "incoming"), run_dir, **given)


def test_each_sample_is_predicted_before_it_is_trained_on(case: Path, tmp_path: Path) -> None:
    """A model with learning rates of 0 predicts like its first export, measured by scikit-learn in each window."""
    frozen = ["optimizer.embedding_lr=0", "optimizer.dense_lr=0", "optimizer.embedding_init_std=0"]
    run(case, tmp_path / "run", *frozen, source=case / "short", publish=str(tmp_path / "published"))
    assert load_config(tmp_path / "run" / "config.toml").optimizer.l2 == 1e-6  # whatever the size of the data set
    table, codec = pq.read_table(case / "short"), SampleCodec.load(case / "data")
    block = codec.encode(codec.from_table(table)).block
    predicted = ServedModel.load(tmp_path / "run" / "base").predict(block).astype(np.float64)
    labels, times = table["label"].to_numpy(), table["time"].to_numpy()
    windows = metrics(tmp_path / "run", "window")
    starts = np.unique(times // (2 * 86400)) * 2 * 86400
    assert [window["start"] for window in windows] == starts.tolist()
    for window in windows:
        inside = times // (2 * 86400) == window["start"] // (2 * 86400)
        label, prediction = labels[inside], predicted[inside]
        assert window["samples"] == inside.sum()
        assert window["auc"] == pytest.approx(roc_auc_score(label, prediction), abs=1e-6)
        assert window["logloss"] == pytest.approx(log_loss(label, prediction), abs=1e-6)
        assert window["calibration"] == pytest.approx(prediction.mean() / label.mean(), abs=1e-5)


def test_a_window_of_many_samples_is_closed_in_parts(tmp_path: Path) -> None:
    """So that neither memory nor snapshots grow with the window; each part has its exact quality."""
    logits, labels = torch.randn(12, 3), (torch.rand(12, 3) < 0.5).float()
    found, times = [], torch.tensor([7201, 7300, 10799])
    quality = ProgressiveQuality(3600, most=5)
    for batch in range(12):
        found += quality.add(logits[batch], labels[batch], times)
        feather.write_feather(quality.frozen(), str(tmp_path / WINDOW_FILE))
        quality = ProgressiveQuality(3600, most=5)
        quality.load(tmp_path)
        assert quality.newest_time == 10799, "of the samples that were trained on, and not of those that wait"
    assert [(window.start, window.samples) for window in found] == [(7200, 6)] * 6
    expected = [log_loss(labels[n : n + 2].ravel(), logits[n : n + 2].ravel().sigmoid()) for n in range(0, 12, 2)]
    assert [window.logloss for window in found] == pytest.approx(expected)
    assert quality.is_empty


def test_an_idle_trainer_publishes_nothing_and_answers_prometheus(case: Path, tmp_path: Path) -> None:
    """At most two versions are of one step (a full one may follow), though many were due while no samples came."""
    scraped, port = {}, free_port()
    write_stream(tmp_path / "in", [*drifting_tables(DRIFT, 0, 200, chunk_rows=200)], end=False)

    def end() -> None:
        try:
            wait_for((tmp_path / "published").exists)
            wait_for(lambda: 4 in steps_of(open_target(str(tmp_path / "published"))))  # the last, of a short batch
            time.sleep(1.0)
            with urlopen(f"http://127.0.0.1:{port}/livez") as answer:
                assert json.loads(answer.read()) == {"status": "alive"}
            with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                for family in text_string_to_metric_families(answer.read().decode()):
                    scraped.update({(sample.name, *sample.labels.values()): sample.value for sample in family.samples})
        finally:
            (tmp_path / "in" / "_END").touch()

    thread = Thread(target=end)
    thread.start()
    settings = ["online.publish_seconds=0", "online.dense_seconds=0", "online.max_wait_seconds=0.1"]
    settings += [f"online.metrics_port={port}", "online.window=4h"]
    run(case, tmp_path / "run", *settings, source=tmp_path / "in", publish=str(tmp_path / "published"))
    thread.join()
    steps = steps_of(open_target(str(tmp_path / "published")))
    assert max(Counter(steps).values()) <= 2
    assert (scraped["cowrec_online_samples_total",], scraped["cowrec_online_steps_total",]) == (200, 4)
    assert scraped["cowrec_online_stream_samples_total", "handed_out"] == 200
    shares = {key[1]: value for key, value in scraped.items() if key[0] == "cowrec_online_usual_missing_share"}
    counts = {key[1]: value for key, value in scraped.items() if key[0] == "cowrec_online_missing_values_total"}
    assert shares.keys() == counts.keys() >= {"C1", "C2", "C3", "I1", "I2"}
    assert not any((*shares.values(), *counts.values()))
    assert scraped["cowrec_online_waits_for_correction",] == 0
    assert scraped["cowrec_online_snapshot_failures_total",] == 0
    assert scraped["cowrec_online_seconds_since_snapshot",] >= 0
    last = metrics(tmp_path / "run", "window")[-2]  # the last one was open until the end
    for key in ("auc", "calibration"):
        assert scraped[f"cowrec_online_window_{key}",] == pytest.approx(last[key], nan_ok=True)
    assert scraped["cowrec_online_lag_seconds",] > 0
    assert scraped["cowrec_online_seconds_since_publication",] >= 0
    assert scraped["cowrec_online_publication_failures_total",] == 0


def test_a_trainer_that_is_stuck_is_not_alive() -> None:
    with metrics_endpoint("127.0.0.1", 0, lambda: ({}, {name: {} for name in LABELLED}), lambda: False) as port:
        with pytest.raises(HTTPError, match="503"):
            urlopen(f"http://127.0.0.1:{port}/livez")
        with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            text = answer.read().decode()
    assert "process_cpu_seconds_total " in text
    assert "cowrec_build_info{cowrec=" in text


def steps_of(target: Target) -> list[int]:
    return [decode(target.read(version, kind)).change.step for version, kind in target.blobs()]


def test_a_resumed_run_is_bit_identical(case: Path, tmp_path: Path) -> None:
    """Weights, rows of ids, stream position and open window, resumed from the first snapshot."""
    given = ["online.snapshot_seconds=0", "checkpoint.keep_last=1000", "online.window='1d'"]
    run(case, tmp_path / "uninterrupted", *given, source=case / "short")
    first = min(int(path.name[5:]) for path in (tmp_path / "uninterrupted" / "checkpoints").iterdir())
    copy = interrupted(tmp_path / "uninterrupted", first, tmp_path / "copy")
    run(case, copy, *given, source=case / "short", resume=True)
    assert_same(copy, tmp_path / "uninterrupted")
    for kind in ("window", "ids"):
        assert metrics(copy, kind) == metrics(tmp_path / "uninterrupted", kind)


def test_a_run_over_a_data_set_is_no_run_over_a_stream(case: Path, tmp_path: Path) -> None:
    config = load_config(case / "run.toml")
    train(config, case / "data", tmp_path / "run")
    message = "it is of a run of cowrec train; give online a new --run-dir, and .* --set train.warm_start=.*/run"
    refused(message, online, config, case / "data", str(case / "short"), tmp_path / "run", resume=True)


@pytest.mark.thorough
def test_a_stream_that_continues_after_its_end_is_resumed(case: Path, tmp_path: Path) -> None:
    """Also with other settings of the operation, and with readers, which lose ids that the run had before.

    Ids of the first part of the stream are evicted in the second one, without having occurred there. A reader that has
    applied all versions predicts exactly like an export of the run.
    """
    settings = ["optimizer.absent_rows=lazy", "id_table.expire_after=''", "id_table.capacity=700"]
    settings += ["online.publish_seconds=0.05", "online.dense_seconds=0.3"]
    settings += ["online.window='1h'"]  # of which the first one ended with the stream
    tables = list(drifting_tables(DRIFT, 0, SAMPLES, chunk_rows=500))
    write_stream(tmp_path / "in", tables[:4])
    run(case, tmp_path / "run", *settings, source=tmp_path / "in")
    (tmp_path / "in" / "_END").unlink()
    write_stream(tmp_path / "in", tables[4:], first=4)
    again: dict[str, Any] = {"source": tmp_path / "in", "resume": True, "publish": str(tmp_path / "published")}
    operation = ["online.report_seconds=7", "online.damaged_files='skip'", "online.on_nonfinite='stop'"]
    report = run(case, tmp_path / "run", *settings, *operation, **again)
    assert report["samples"] == SAMPLES
    assert sum(table["evicted"] for table in report["id_tables"].values()) > 300
    served = assert_readers_equal_an_export(case, tmp_path / "run", tmp_path / "published")
    assert (served.state.version > 3, served.state.step) == (True, report["steps"])
    assert served.counters()["removed_rows"] > 0
    with pytest.raises(ValueError, match=r"of another configuration: it has online\.lateness"):
        run(case, tmp_path / "run", *settings, "online.lateness='7s'", **again)


def test_a_warm_start_takes_the_weights_and_ids_of_an_earlier_run(case: Path, tmp_path: Path) -> None:
    """The export with which the run begins predicts exactly like the earlier run's; a resumed run keeps its own."""
    given: dict[str, Any] = {"source": case / "short", "publish": str(tmp_path / "published")}
    run(case, tmp_path / "first", source=case / "short")
    run(case, tmp_path / "second", f"train.warm_start={tmp_path}/first", **given)
    export_run(tmp_path / "first", tmp_path / "export")
    codec = SampleCodec.load(case / "data")
    block = codec.encode(codec.from_table(pq.read_table(case / "short"))).block
    earlier, warm = (
        ServedModel.load(tmp_path / folder).predict(block) for folder in ("export", Path("second", "base"))
    )
    assert np.array_equal(warm, earlier)
    before = up_to_date(tmp_path / "second")
    run(case, tmp_path / "second", f"train.warm_start={tmp_path}/first", **given, resume=True)
    assert all(torch.equal(value, before[name]) for name, value in up_to_date(tmp_path / "second").items())


def test_readers_have_the_rows_of_unknown_and_missing_ids_exactly(case: Path, tmp_path: Path) -> None:
    """Which L2 moves at each step under "replay", though no sample has them; a last delta follows the first version."""
    settings = ["online.publish_seconds=1000", "optimizer.absent_rows=replay", "optimizer.l2=0.01"]
    run(case, tmp_path / "run", *settings, source=case / "short", publish=str(tmp_path / "published"))
    served = followed(tmp_path / "run", tmp_path / "published")
    export_run(tmp_path / "run", tmp_path / "export")
    codec = SampleCodec.load(case / "data")
    samples = [dict.fromkeys(codec.columns, given) for given in (None, 10**15)]
    for sample in samples:
        sample |= {name: 0.5 for name in codec.columns if name.startswith("I")}
    block, bad = codec.encode_request(samples)
    assert (served.state.step, bad) == (1000 // 64 + 1, ())
    assert np.array_equal(served.predict(block), ServedModel.load(tmp_path / "export").predict(block))


def test_expired_ids_are_neither_served_nor_exported(case: Path, tmp_path: Path) -> None:
    """Also those that no sweep has reached: samples are seven minutes apart, and ids expire after an hour."""
    settings = ["online.publish_seconds=0", "id_table.expire_after='1h'"]
    run(case, tmp_path / "run", *settings, source=case / "short", publish=str(tmp_path / "published"))
    served = assert_readers_equal_an_export(case, tmp_path / "run", tmp_path / "published")
    resident = sum(table["resident"] for table in report_of(tmp_path / "run")["id_tables"].values())
    assert 0 < served.counters()["resident_ids"] < resident


def test_a_run_that_cannot_start_leaves_nothing_behind(case: Path, tmp_path: Path) -> None:
    refused("must name a stream", run, case, tmp_path / "run", source=Path("redis://localhost:1/0"))
    with pytest.raises(OSError, match="is not a folder"):
        run(case, tmp_path / "run", source=tmp_path / "nowhere")
    assert not (tmp_path / "run").exists()
    timeless = make_data(tmp_path / "timeless", ("price", "city"))
    config = load_config(case / "run.toml", ["model.embedding_dims={}"])
    refused("goes by the time of samples", online, config, timeless, str(case / "incoming"), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_no_id_is_late_in_the_random_order_of_a_data_set(case: Path, tmp_path: Path, caplog: Any) -> None:
    """Rows and weights are those of a run without expiry; what has expired at the end is unknown in evaluation."""
    counts = ["id_table.admission=count", "id_table.threshold=2"]
    for name, expiry in (("with", ["expire_after=3d", "window=1d"]), ("without", ["expire_after=''"])):
        settings = [*counts, *(f"id_table.{setting}" for setting in expiry), "id_table.capacity=20000"]
        train(load_config(case / "run.toml", settings), case / "data", tmp_path / name)
    assert "id_table.window has no effect on a data set" in caplog.text
    last, plain = (metrics(tmp_path / name, "ids")[-1] for name in ("with", "without"))
    for table in ("C1", "C2", "C3"):
        assert last[table]["late"] == last[table]["expired"] == 0
        assert last[table]["admitted"] == plain[table]["admitted"]
    one, other = (up_to_date(tmp_path / name) for name in ("with", "without"))
    assert_close(*({key: value for key, value in state.items() if "/id_tables" not in key} for state in (one, other)))
    qualities = [metrics(tmp_path / name, "eval")[-1]["logloss"] for name in ("with", "without")]
    assert qualities[0] != qualities[1]


@pytest.mark.thorough
@pytest.mark.parametrize("when_full", ["oldest", "least_frequent"])
def test_a_year_of_drifting_ids_in_a_bounded_table(tmp_path: Path, when_full: str) -> None:
    """The table stays within its capacity, a fifth of the ids seen, and its AUC within 0.1 % of an unbounded table's.

    The AUC is of the second half of the year; the first fills the table.
    """
    drift = replace(DRIFT, rows=60_000, days=365.0, new_ids_per_day=(0, 5, 30), lifetime_days=2.0, id_effect=0.6)
    case = make_case(tmp_path / "case")
    write_stream(tmp_path / "year", list(drifting_tables(drift, 0, drift.rows, chunk_rows=10_000)))
    settings = ["train.batch_size=256", "optimizer.base_batch_size=256", "online.window='365d'"]
    bounded = [*settings, "id_table.capacity=1000", f"id_table.when_full={when_full}", "id_table.expire_after='20d'"]
    unbounded = [*settings, "id_table.capacity=100000", "id_table.expire_after=''"]
    reports = [
        run(case, tmp_path / f"run{number}", *settings, "online.window='180d'", source=tmp_path / "year")
        for number, settings in enumerate((bounded, unbounded))
    ]
    tables = [table for line in metrics(tmp_path / "run0", "ids") for table in line.values() if isinstance(table, dict)]
    assert all(table["resident"] <= 1000 for table in tables)
    resident = [sum(table["resident"] for table in report["id_tables"].values()) for report in reports]
    assert resident[0] < resident[1] / 5
    bounded_auc, unbounded_auc = (report["windows"][1]["auc"] for report in reports)
    assert bounded_auc >= unbounded_auc * 0.999  # also false if one is not a number


BATCH, POISONED = 64, (5, 6, 11)
"""Batches of the stream, from 0, with a sample whose prediction overflows."""

HASHED = ["id_table.kind=hash", "id_table.expire_after=''", "optimizer.absent_rows=lazy"]


@pytest.fixture(scope="module")
def spoiled_case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Streams ``poisoned``, ``clean`` without the poisoned batches, and ``hopeless``, in which all are poisoned."""
    folder = make_case(tmp_path_factory.mktemp("quarantine"))
    output = "self.out(self.norm(x.flat)).squeeze(1) + (dense / 10).exp().mean(1)"
    write_network(folder / f"exponential_in_{folder.name}.py", output)  # a worker may make the folder twice
    rows = pa.concat_tables(drifting_tables(DRIFT, 0, 16 * BATCH, chunk_rows=500)).sort_by("time")
    number = np.arange(len(rows))
    kept = pa.array(~np.isin(number // BATCH, POISONED))
    write_stream(folder / "clean", [rows.filter(kept)])
    write_stream(folder / "poisoned", [spoiled(rows, (number % BATCH == 7) & ~kept.to_numpy(zero_copy_only=False))])
    write_stream(folder / "hopeless", [spoiled(rows, (number % BATCH == 7) & (number >= 2 * BATCH))])
    return folder


def spoiled(rows: pa.Table, where: np.ndarray) -> pa.Table:
    """The samples with a first number of 1e39, which float32 cannot hold, in some of them."""
    numbers = pc.if_else(pa.array(where), pa.scalar(1e39), rows["I1"].cast(pa.float64()))
    return rows.set_column(rows.column_names.index("I1"), "I1", numbers)


@pytest.fixture
def spoiled_run(spoiled_case: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(spoiled_case)

    def follow(source: str, name: str, *overrides: str, **given: Any) -> dict[str, Any]:
        always = [f"model.name=exponential_in_{spoiled_case.name}:Net", "train.log_every=4"]
        return run(spoiled_case, tmp_path / name, *always, *overrides, source=spoiled_case / source, **given)

    return follow


def test_the_model_is_as_if_the_batches_had_not_come(
    spoiled_run: Any,
    spoiled_case: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights, moments and the means of BatchNorm, bit for bit, also for readers; samples and reason are kept."""
    monkeypatch.setattr("cowrec.trainer.online.publication.CHUNK", 7)  # rows that are copied at a time
    report = spoiled_run("poisoned", "poisoned", *HASHED, publish=str(tmp_path / "published"))
    spoiled_run("clean", "clean", *HASHED)
    assert_readers_equal_an_export(spoiled_case, tmp_path / "poisoned", tmp_path / "published", source="clean")
    found, expected = (tensors(checkpoint(tmp_path / name)) for name in ("poisoned", "clean"))
    compared = [name for name in expected if name != "/iterations"]  # which FBGEMM counts in forward passes
    assert any("running_mean" in name for name in compared)
    for name in compared:
        assert torch.equal(found[name], expected[name]), name
    assert (report["steps"], report["batches_set_aside"]) == (16 - len(POISONED), len(POISONED))
    files = sorted((tmp_path / "poisoned" / "quarantine").iterdir())
    assert [file.name for file in files] == [f"batch_{number + 1:09d}.parquet" for number in POISONED]
    samples = pq.read_table(files[0])
    assert np.flatnonzero(~np.isfinite(samples["logit"].to_numpy())).tolist() == [7]
    assert "the loss is " in samples["reason"][0].as_py()
    assert {"time", "sample_id", "label"} <= set(samples.column_names)
    assert caplog.text.count(f"({BATCH} samples) is set aside") == len(POISONED)
    logged = {kind: metrics(tmp_path / "poisoned", kind) for kind in ("set_aside", "stream", "train")}
    assert [line["batch"] for line in logged["set_aside"]] == [number + 1 for number in POISONED]
    assert logged["stream"][-1]["batches_set_aside"] == len(POISONED)
    assert all(np.isfinite(line["loss"]) for line in logged["train"])


def test_batch_normalisation_never_meets_a_single_sample(spoiled_run: Any, spoiled_case: Path, tmp_path: Path) -> None:
    """Of 65 samples at the end, in batches of 64."""
    rows = pq.read_table(sorted((spoiled_case / "clean").glob("*.parquet"))[0]).slice(0, BATCH + 1)
    write_stream(spoiled_case / "uneven", [rows])
    report = spoiled_run("uneven", "uneven", *HASHED)
    assert (report["steps"], report["samples"]) == (2, BATCH + 1)


@pytest.mark.thorough
def test_a_resumed_run_sets_the_same_batches_aside(spoiled_run: Any, tmp_path: Path) -> None:
    given = ["online.snapshot_seconds=0", "checkpoint.keep_last=1000"]
    spoiled_run("poisoned", "whole", *given)
    copy = interrupted(tmp_path / "whole", 8, tmp_path / "copy")  # two were set aside before, one comes again
    report = spoiled_run("poisoned", copy.name, *given, resume=True)
    assert report["batches_set_aside"] == len(POISONED)
    assert_same(copy, tmp_path / "whole")


def test_many_batches_in_a_row_end_the_run(spoiled_run: Any, tmp_path: Path) -> None:
    """The model is at fault then, or all of the data; with `stop` the first one ends it."""
    with pytest.raises(NonFiniteLoss, match=f"in {MOST_SET_ASIDE} batches in a row after step 2"):
        spoiled_run("hopeless", "hopeless", *HASHED)
    assert len(list((tmp_path / "hopeless" / "quarantine").iterdir())) == MOST_SET_ASIDE - 1
    with pytest.raises(NonFiniteLoss, match="the loss was not finite at step 6"):
        spoiled_run("poisoned", "stops", *HASHED, "online.on_nonfinite=stop")
