"""Plans of clusters: what they hold, what does not fit, what is refused, and the time of collectives."""

import json
import re
from pathlib import Path

import pytest

from commands.command_line import exit_code
from cowrec.data_pipeline import Schema
from cowrec.models import physical_dim
from cowrec.trainer.planning.cluster import PRESETS, Cluster, load_cluster
from cowrec.trainer.planning.rehearsal import Collective
from cowrec.trainer.planning.step_time import collective_time
from trainer_cases import CONFIG, config_file, make_data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    make_data(folder)
    config_file(folder)
    return folder


def plan(monkeypatch: pytest.MonkeyPatch, folder: Path, cluster: str, *settings: str) -> int:
    given = [part for each in settings for part in ("--set", each)]
    command = ("plan", folder / "run.toml", "--data", folder / "data", "--cluster", cluster)
    return exit_code(monkeypatch, *command, "--output", folder / "plan.json", *given)


@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
def test_ranks_hold_the_bytes_of_all_rows(monkeypatch: pytest.MonkeyPatch, folder: Path, kind: str) -> None:
    """Weights and two moments in float32, and a last step in int32."""
    assert plan(monkeypatch, folder, "cpu:2", f"sharding.plan={kind}") == 0
    found = json.loads((folder / "plan.json").read_text())
    held = [len(each["ranks"]) * sum(list(each["memory"].values())[:3]) for each in found["ranks"]]
    rows = sum(field.num_embeddings for field in Schema.load(folder / "data").sparse)
    assert sum(held) == rows * (12 * physical_dim(6) + 4)
    assert sorted(rank for each in found["ranks"] for rank in each["ranks"]) == [0, 1, 2, 3]
    assert "embedding_dim = 6" in CONFIG


def test_plan_names_what_does_not_fit_and_what_does(
    monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "small.toml").write_text('preset = "dgx-h100"\nmemory_gb = 2.0\ndevices = 2\n')
    settings = ("train.device=cuda", "sharding.plan=table_wise", "model.embedding_dim=63", "train.batch_size=8")
    assert plan(monkeypatch, folder, f"{folder}/small.toml", *settings) == 0
    printed = capsys.readouterr().out
    assert re.search(r"does not fit: rank \d needs 2\.0 GB of its GPU's 2: tables", printed)
    assert "column_wise, uvm" in printed
    assert json.loads((folder / "plan.json").read_text())["misfits"]


def test_the_work_of_a_step_is_timed_here(
    monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "cpus.toml").write_text('preset = "cpu"\nhosts = 2\n')
    command = ("plan", folder / "run.toml", "--data", folder / "data", "--cluster", folder / "cpus.toml", "--timed")
    assert exit_code(monkeypatch, *command, "--output", folder / "plan.json") == 0
    assert re.search(r"work +[0-9.]+ +this machine", capsys.readouterr().out)
    for each in json.loads((folder / "plan.json").read_text())["ranks"]:
        assert each["time"]["work"]["seconds"] > 0
        assert "ids (all_to_all)" in each["time"]


def test_fused_optimizers_are_refused(
    monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(monkeypatch, folder, "cpu:1", "optimizer.embedding=sgd", "clip.rule=none", "optimizer.l2=0.0") == 2
    assert 'optimizer.embedding = "sgd" cannot be planned' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hostz = 2", "unknown key hostz; did you mean 'hosts'?"),
        ('preset = "dgx-h10"', "preset = 'dgx-h10' is unknown; did you mean 'dgx-h100'?"),
        ("hosts = 0\nmemory_gb = 80.0", "hosts must be at least 1, got 0"),
        ('device = "cuda"', "memory_gb must be the memory of a GPU, got 0.0"),
        ("hosts =", "is not TOML"),
        ('hosts = "two"', "hosts = 'two'"),
        ('preset = "cpu"\nteraflops = 0.0', "teraflops must be a positive number, got 0.0"),
    ],
)
def test_wrong_clusters_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "cluster.toml").write_text(text)
    with pytest.raises(ValueError, match=r"cluster\.toml") as error:
        load_cluster(tmp_path / "cluster.toml")
    assert message in str(error.value)


def test_presets_and_hosts() -> None:
    assert load_cluster("dgx-h100:8").ranks == 64
    assert load_cluster("cpu") == PRESETS["cpu"]
    with pytest.raises(ValueError, match="'x' is not a number of hosts"):
        load_cluster("p4d:x")
    with pytest.raises(ValueError, match="does not exist; write a TOML file, or name a preset: dgx-h100"):
        load_cluster("p5")


CLUSTER = Cluster(
    hosts=2,
    devices=2,
    device="cpu",
    within_gb_per_second=10.0,
    between_gb_per_second=1.0,
    within_microseconds=1000.0,
    between_microseconds=2000.0,
)


@pytest.mark.parametrize(
    ("collective", "seconds", "bound"),
    [
        # Of rank 1: 3 GB to rank 0 in 0.3 s, at the same time 1 + 2 GB to the other host in 3 s.
        (Collective("all_to_all", "", (0, 1, 2, 3), 0, (3 * 10**9, 7, 10**9, 2 * 10**9)), 3.002, "network"),
        (Collective("all_to_all", "", (0, 1), 0, (3 * 10**9, 7)), 0.301, "links within a host"),
        # A ring of four ranks moves 2 * 3 / 4 of 4 GB, over the links of two devices for each host.
        (Collective("all_reduce", "", (0, 1, 2, 3), 4 * 10**9), 3.002, "network"),
        (Collective("all_reduce", "", (0, 1), 4 * 10**9), 0.401, "links within a host"),
        (Collective("all_gather", "", (1, 3), 10**9), 1.002, "network"),
        (Collective("reduce_scatter", "", (0, 1), 8), 0.001, "latency"),
        (Collective("all_reduce", "", (1,), 10**9), 0.0, "latency"),
    ],
)
def test_time_of_collectives(collective: Collective, seconds: float, bound: str) -> None:
    found = collective_time(collective, CLUSTER, rank=1)
    assert found.seconds == pytest.approx(seconds)
    assert found.bound == bound
