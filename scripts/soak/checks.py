"""The checks at the end of the soak: nothing lost, the model of an uninterrupted run, readers that equal it."""

import http.client
import json
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from cowrec.data_pipeline import Position, SampleCodec
from cowrec.trainer.export.export import export_run
from cowrec.trainer.export.manifest import DENSE, TABLES
from cowrec.trainer.publishing.follower import VersionReader
from cowrec.trainer.publishing.target import open_target
from cowrec.trainer.runs.checkpoint_folder import list_checkpoints
from cowrec.trainer.runs.run_dir import CHECKPOINTS
from cowrec.trainer.serving.served_model import ServedModel

from .processes import SERVERS, Cluster, Process, free_ports, metrics, wait_for
from .samples import Expected, Producer

STOPPED = 130
"""Exit code of a run that saved its state after SIGTERM."""
PREDICTED = 500
SETTLED_SECONDS = 8.0
"""Time without a new version after which the weights of the network, published every four seconds, are current."""

Checks = dict[str, bool]
Rows = dict[tuple[int, int], bytes]
"""Rows of a table by feature and id."""
Model = tuple[dict[str, Rows], dict[str, bytes]]
"""Rows by table, and dense weights."""


def final_checks(cluster: Cluster, producer: Producer, seconds: float) -> tuple[Checks, dict[str, Any]]:
    """Waits until every sample is trained on and published, ends the trainer, and compares; returns checks and counts.

    Args:
        cluster: everything runs; the producer has ended.
        producer: knows what was sent.
        seconds: limit for the trainer, and for the uninterrupted run, to train on everything.
    """
    with cluster.client() as client:
        expected = Expected.of_stream(client)
    found = all_trained(cluster.metrics_port, expected, cluster.trainer, seconds)
    checks = {
        "nothing_lost_by_redis": expected.valid == producer.sent["valid"],
        "every_valid_sample_trained_on_once": found["handed_out"] == expected.valid and not found["batches_set_aside"],
        "every_sample_counted": {name: found[name] for name in ("samples", "late", "malformed", "duplicates")}
        == {"samples": expected.entries}
        | {name: asdict(expected)[name] for name in ("late", "malformed", "duplicates")},
        "no_gap_in_the_stream": not (found["gaps"] or found["rewound"] or found["lost"]),
        "batches_independent_of_timing": found["flushes"] == 1 and not found["forced"],
    }
    published = wait_until(lambda: all(cluster.health(name).get("step") == found["steps"] for name in SERVERS))
    checks["all_steps_published"] = published and settled(cluster)
    checks["stopped_in_order"] = cluster.trainer.end(signal.SIGTERM) == STOPPED
    reference = uninterrupted(cluster, expected, seconds)
    checks["model_of_an_uninterrupted_run"] = same_runs(cluster.run_dir, reference)
    export = cluster.folder / "export"
    export_run(cluster.run_dir, str(export))
    checks["published_rows_of_the_model"], expired = compare(published_model(cluster.target), exported_model(export))
    checks["servers_predict_as_the_model"] = servers_agree(cluster, producer, export)
    counts = {"expected": asdict(expected), "sent": dict(producer.sent), "counters": found}
    return checks, counts | {"expired_rows_still_published": expired}


def all_trained(port: int, expected: Expected, process: Process, seconds: float) -> dict[str, float]:
    """Waits until a trainer has trained on every valid sample, or for the limit; returns its metrics."""
    wait_until(lambda: metrics(port).get("handed_out") == expected.valid or process.exit_code is not None, seconds)
    return metrics(port)


def uninterrupted(cluster: Cluster, expected: Expected, seconds: float) -> Path:
    """Runs the same training once more, from the beginning of the stream and without a fault; returns its folder."""
    run_dir, port = cluster.folder / "uninterrupted", free_ports(1)[0]
    process = Process("uninterrupted", cluster.online(run_dir, port, None), cluster.folder)
    process.start()
    try:
        wait_for(lambda: metrics(port), "the uninterrupted run", process)
        all_trained(port, expected, process, seconds)
        process.end(signal.SIGTERM)
    finally:
        process.close()
    return run_dir


def same_runs(one: Path, other: Path) -> bool:
    """Whether two runs have the same bits in every tensor, and the same position in the stream."""
    newest = [list_checkpoints(run / CHECKPOINTS)[-1] for run in (one, other)]
    states = []
    for run, path in zip((one, other), newest, strict=True):
        dcp_to_torch_save(path, run / "checkpoint.pt")
        states.append(tensors(torch.load(run / "checkpoint.pt")))
    first, second = (Position.load(path) for path in newest)
    # The journal's entries depend on how polls divided the samples.
    same_position = replace(first, entry=0, waiting=second.waiting, recent=()) == replace(
        second, entry=0, waiting=second.waiting, recent=(), latest=first.latest
    )
    found, expected = states
    equal = found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)
    return equal and same_position and bool(np.array_equal(first.latest, second.latest))


def tensors(state: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Tensors of nested dictionaries by path."""
    if isinstance(state, torch.Tensor):
        return {path: state}
    return {key: value for name, each in state.items() for key, value in tensors(each, f"{path}/{name}").items()}


def compare(published: Model, model: Model) -> tuple[bool, dict[str, int]]:
    """Whether every row and weight of the model is published as it is; the rows that are published besides, by table.

    These are of ids that have expired, which readers keep until the sweep of their table, or a full version.
    """
    tables, expected = published[0], model[0]
    equal = tables.keys() == expected.keys() and published[1] == model[1]
    equal = equal and all(tables[name].items() >= rows.items() for name, rows in expected.items())
    return equal, {name: len(tables[name].keys() - rows.keys()) for name, rows in expected.items()}


def published_model(url: str) -> Model:
    """Rows and dense weights of a reader that applies every version after the newest full one."""
    target = open_target(url)
    tables, dense = dict[str, Rows](), dict[str, bytes]()
    newest = target.blobs()[-1][0]
    for blob in VersionReader(target).versions(Event()):
        for name, change in blob.change.tables.items():
            rows = tables.setdefault(name, {})
            if blob.kind == "full":
                rows.clear()
            for key in keys(change.deleted, change.deleted_feature):
                rows.pop(key, None)
            rows.update(zip(keys(change.ids, change.feature), map(np.ndarray.tobytes, change.rows), strict=True))
        dense.update({name: each.tobytes() for name, each in blob.change.dense.items()})
        if blob.version == newest:
            break
    target.close()
    return tables, dense


def exported_model(export: Path) -> Model:
    """Rows and dense weights of an export in float32."""
    tables = {}
    for file in (export / TABLES).glob("*.safetensors"):
        stored = safetensors.numpy.load_file(file)
        found = zip(keys(stored["ids"], stored.get("feature")), map(np.ndarray.tobytes, stored["rows"]), strict=True)
        tables[file.stem] = dict(found)
    return tables, {name: each.tobytes() for name, each in safetensors.numpy.load_file(export / DENSE).items()}


def keys(ids: np.ndarray, feature: np.ndarray | None) -> list[tuple[int, int]]:
    return list(zip(np.zeros_like(ids).tolist() if feature is None else feature.tolist(), ids.tolist(), strict=True))


def servers_agree(cluster: Cluster, producer: Producer, export: Path) -> bool:
    """Whether both servers predict the last samples exactly as the exported model does."""
    samples = [json.loads(each.content) for each in producer.newest[-PREDICTED:]]
    block, _ = SampleCodec.load(export).encode_request(samples)
    expected = ServedModel.load(export).predict(block).tolist()
    return all(predictions(port, samples) == expected for port in cluster.ports.values())


def predictions(port: int, samples: Sequence[Mapping[str, Any]]) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30.0)
    connection.request("POST", "/predict", json.dumps(samples))
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer.get("probabilities")


def settled(cluster: Cluster, seconds: float = 120.0) -> bool:
    """Waits until both servers have had the same version for a while; whether they did in time."""
    end, versions, since = time.monotonic() + seconds, list[Any](), time.monotonic()
    while time.monotonic() < end:
        found = [cluster.health(name).get("version") for name in SERVERS]
        if found != versions:
            versions, since = found, time.monotonic()
        elif time.monotonic() - since > SETTLED_SECONDS:
            return len(set(versions)) == 1
        time.sleep(0.5)
    return False


def wait_until(happened: Any, seconds: float = 60.0) -> bool:
    """Waits for a condition; whether it came true in time."""
    end = time.monotonic() + seconds
    while not happened() and time.monotonic() < end:
        time.sleep(0.5)
    return bool(happened())
