"""Warm starts: ids that both runs have keep the weights of the earlier run, matched by their strings."""

import dataclasses
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from cowrec.data_pipeline import PrepareConfig, Schema, prepare
from cowrec.trainer.export.export import export_run
from cowrec.trainer.training.saved_run import evaluate_run
from refusal import refused
from trained_runs import run as run_of
from trainer_cases import CONFIG, case_of, checkpoint, train_in_processes

COLUMNS = '[[fields]]\nname = "price"\nkind = "numeric"\n[[fields]]\nname = "city"\nkind = "categorical"\n'
NARROW = "model.embedding_dim=3"
SETTINGS = ["train.epochs=1", "train.batch_size=20", "optimizer.base_batch_size=20", "optimizer.l2=1e-3"]


def data(folder: Path, name: str, cities: list[str], columns: str = COLUMNS) -> Path:
    """Prepares 60 training and 20 test samples over some cities, the first of which are the most frequent."""
    rows = [f"{i % 3 == 0:d},{i % 7},{cities[int(len(cities) * (i / 80) ** 2)]}" for i in range(80)]
    rows = rows[::2] + rows[1::2]
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.csv").write_text("\n".join(["click,price,city", *rows]) + "\n")
    (folder / "columns.toml").write_text(f'delimiter = ","\nlabel = "click"\n{columns}')
    (folder / "run.toml").write_text(CONFIG)
    settings = PrepareConfig(split="order", test_rows=20)
    prepare("tabular", [folder / f"{name}.csv"], folder / name, settings, schema_file=folder / "columns.toml")
    return folder / name


def run(folder: Path, data_dir: Path, name: str, *more: str) -> None:
    run_of(folder, folder / name, *SETTINGS, *more, data=data_dir)


def rows_by_city(run_dir: Path) -> dict[str, torch.Tensor]:
    cities = pq.read_table(run_dir / "vocabulary" / "city.parquet")["value"].to_pylist()
    (key,) = [key for key in checkpoint(run_dir)["model"] if key.endswith(".city.weight")]
    table = checkpoint(run_dir)["model"][key]
    return {city: table[2 + index] for index, city in enumerate(cities)}


def test_known_ids_keep_their_weights(tmp_path: Path) -> None:
    """The checkpoint of a run with learning rates of 0 equals its start; the vocabulary has grown, in another order."""
    mode = ("optimizer.absent_rows=lazy", "train.average=false")
    run(tmp_path, data(tmp_path, "old", ["rome", "oslo", "lima", "bonn"]), "first", *mode)
    grown = data(tmp_path, "new", ["lima", "kyiv", "rome", "bonn", "oslo", "cork"])
    frozen = ["optimizer.embedding_lr=0", "optimizer.dense_lr=0", *mode]
    run(tmp_path, grown, "second", f"train.warm_start={tmp_path}/first", *frozen)
    run(tmp_path, grown, "cold", *frozen)
    old, new, cold = (rows_by_city(tmp_path / name) for name in ("first", "second", "cold"))
    assert set(new) - set(old) == {"kyiv", "cork"}
    for city in old:
        assert torch.equal(new[city], old[city])
    for city in ("kyiv", "cork"):
        assert torch.equal(new[city], cold[city])
    first, second = (checkpoint(tmp_path / name)["model"] for name in ("first", "second"))
    for key in (name for name in first if "embedding_bags" not in name):  # the warm-up starts at a rate of 1e-8
        torch.testing.assert_close(second[key], first[key], rtol=0, atol=1e-7)


def test_id_tables_count_by_times_or_by_batches(tmp_path: Path) -> None:
    untimed, ids = data(tmp_path, "old", ["rome", "oslo"]), ["id_table.kind=collisionless", "id_table.capacity=64"]
    timed = data(tmp_path, "new", ["rome", "oslo"], 'time = "price"\n' + COLUMNS)
    for earlier, now, message in ((untimed, timed, "without times, .* with times"), (timed, untimed, "with times, .*")):
        run(tmp_path, earlier, earlier.name + "_first", *ids)
        start = f"train.warm_start={tmp_path}/{earlier.name}_first"
        refused(f"on samples {message}", run, tmp_path, now, earlier.name + "_second", *ids, start)
    (tmp_path / "old_first" / "journal").mkdir()  # as of a run on a stream, whose samples always have times
    start = f"train.warm_start={tmp_path}/old_first"
    refused("on samples with times, .* without times", run, tmp_path, untimed, "third", *ids, start)


def test_processes_start_from_a_run_of_one_whose_sharding_they_could_not_have(tmp_path: Path) -> None:
    """Four columns, with the wide weight, cannot be split between two."""
    same = data(tmp_path, "old", ["rome", "oslo", "lima", "bonn"])
    run(tmp_path, same, "first", "sharding.plan=column_wise", NARROW)
    (tmp_path / "run.toml").write_text(CONFIG)
    frozen = ["optimizer.embedding_lr=0", "optimizer.dense_lr=0", f"train.warm_start={tmp_path}/first"]
    train_in_processes(case_of(tmp_path, tmp_path / "second", *SETTINGS, *frozen, NARROW, data=same))
    assert evaluate_run(tmp_path / "second", same)["auc"] == evaluate_run(tmp_path / "first", same)["auc"]


def test_the_same_data_evaluate_equally_and_mismatches_are_refused(tmp_path: Path) -> None:
    """Rows under "replay" are brought up to date before they are copied, for any two plans."""
    same = data(tmp_path, "old", ["rome", "oslo", "lima", "bonn"])
    frozen = ["optimizer.embedding_lr=0", "optimizer.dense_lr=0"]
    run(tmp_path, same, "first")
    for before, after, plan in (("first", "second", "data_parallel"), ("second", "third", "table_wise")):
        run(tmp_path, same, after, f"train.warm_start={tmp_path}/{before}", f"sharding.plan={plan}", *frozen)
        assert evaluate_run(tmp_path / after, same) == evaluate_run(tmp_path / "first", same)
    run(tmp_path, same, "deeper", "model.hidden=[8, 8]")
    run(tmp_path, same, "attentive", "model.name=autoint")
    two_heads = ["model.options.heads=2", "model.name=autoint"]  # as by default
    run(tmp_path, same, "again", *two_heads, f"train.warm_start={tmp_path}/attentive")
    run(tmp_path, same, "four_heads", "model.options.heads=4", "model.name=autoint")
    for earlier, setting, message in (
        ("four_heads", "model.name=autoint", "is another network: model.options.heads is 4 there, and 2 here"),
        ("first", "model.hidden=[9]", r"is another network: .* differs"),
        ("first", "model.name=wdl", r"is another network: model.name is 'deepfm' there, and 'wdl' here"),
        ("deeper", "train.seed=1", r"is another network: it has model.mlp.* too"),
        ("first", "model.embedding_dims.city=3", r"has embeddings of width 6 in table .city., not 3"),
        ("nowhere_else", "train.seed=0", r"is not a run: it has no config\.toml"),
    ):
        refused(message, run, tmp_path, same, f"with_{setting}", f"train.warm_start={tmp_path}/{earlier}", setting)
    other = data(tmp_path / "b", "new", ["rome", "oslo"], COLUMNS.replace("numeric", "categorical"))
    refused(r"another network|has other fields", run, tmp_path, other, "fields", f"train.warm_start={tmp_path}/first")
    schema = Schema.load(tmp_path / "second")
    for kind, change in (("dense", {"transform": "log"}), ("sparse", {"pooling": "mean"})):
        first, *others = getattr(schema, kind)
        dataclasses.replace(schema, **{kind: (dataclasses.replace(first, **change), *others)}).save(tmp_path / "second")
        ((key, value),) = change.items()
        message = (
            rf"trained on a field '{first.name}' with {key} = '{value}', and these data have .* prepare both alike"
        )
        refused(message, run, tmp_path, same, f"other_{key}", f"train.warm_start={tmp_path}/second")


OF_A_GPU = {"precision": "tf32", "memory": "uvm"}


@pytest.mark.parametrize(("key", "value"), OF_A_GPU.items())
def test_a_run_of_a_gpu_is_used_on_cpu(tmp_path: Path, key: str, value: str) -> None:
    """Weights are float32 whatever the products' precision was, and a new run keeps its own."""
    prepared = data(tmp_path, "old", ["rome", "oslo", "lima", "bonn"])
    run(tmp_path, prepared, "first", "optimizer.embedding=adagrad")
    quality = evaluate_run(tmp_path / "first", prepared)
    config = tmp_path / "first" / "config.toml"
    changed, count = re.subn(f"^{key} = .*", f'{key} = "{value}"', config.read_text(), flags=re.MULTILINE)
    assert count == 1
    config.write_text(changed)
    assert evaluate_run(tmp_path / "first", prepared, checkpoint=quality["step"], by="city").items() >= quality.items()
    export_run(tmp_path / "first", tmp_path / "export")
    run(tmp_path, prepared, "second", f"train.warm_start={tmp_path}/first", "train.precision=bfloat16")
