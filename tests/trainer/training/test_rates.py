"""Labels that are rates, and counts of positives with their totals: files, tables and streams, by scikit-learn."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.metrics import log_loss, ndcg_score, roc_auc_score
from torch import Tensor

from cowrec.data_pipeline import Batch, PrepareConfig, SampleCodec, infer_schema, prepare
from cowrec.models.losses import LOSSES, Loss
from cowrec.trainer import evaluate, load_config, predict, train
from cowrec.trainer.online.loop import online
from cowrec.trainer.sharded_model.step import MeanLoss
from cowrec.trainer.sweep.baseline import baselines
from online_cases import write_stream
from raw_cases import prepare_text, read_split
from refusal import refused
from trained_runs import metrics
from trainer_cases import CONFIG

KDD_COLUMNS = ["click", "impression", "display_url", "ad", "advertiser", "depth", "position", "query", "keyword",
               "title", "description", "user"]  # fmt: skip
KDD_SCHEMA = f"""
delimiter = "\\t"
quote = ""
header = false
columns = {KDD_COLUMNS}
label = {{count = "click", of = "impression"}}
fields = [{", ".join(f'{{name = "{name}", kind = "categorical"}}' for name in KDD_COLUMNS[2:])}]
"""


def kdd_lines(rows: int, seed: int = 0) -> list[str]:
    """Lines of KDD Cup 2012, track 2: all impressions of an ad to a user in one setting, after their description."""
    draw = np.random.default_rng(seed)
    ad, user, depth = draw.integers(0, 30, rows), draw.integers(0, 50, rows), draw.integers(1, 4, rows)
    impressions = draw.geometric(0.3, rows)
    clicks = draw.binomial(impressions, 0.1 + 0.8 * (ad % 3 == 0))
    urls, queries = np.uint64(14340390157469404125) + (ad // 2).astype(np.uint64), draw.integers(0, 99, rows)
    columns = (clicks, impressions, urls, ad, ad // 4, depth, draw.integers(1, depth + 1), queries, queries // 2)
    texts = np.stack([column.astype(str) for column in (*columns, ad + 500, ad + 900, user)], axis=1)
    return ["\t".join(row) for row in texts.tolist()]


def test_the_lines_of_kdd_cup_2012_are_trained_and_measured_by_their_impressions(tmp_path: Path) -> None:
    lines = kdd_lines(1000)
    split = PrepareConfig(split="order", test_rows=300)
    schema = prepare_text(
        tmp_path, KDD_SCHEMA.replace("fields", 'keep = ["ad"]\nfields'), "\n".join(lines), config=split
    )
    data, run = tmp_path / "out", tmp_path / "run"
    clicks, impressions = np.array([line.split("\t")[:2] for line in lines], float).T
    of_train = schema.splits["train"]
    assert (of_train.positives, of_train.weight) == ((pytest.approx(clicks[:700].sum()),), impressions[:700].sum())
    (tmp_path / "run.toml").write_text(CONFIG)
    report = train(load_config(tmp_path / "run.toml", ["train.batch_size=50", "optimizer.l2=1e-6"]), data, run)
    predict(run, data, tmp_path / "predicted.parquet")
    found = pq.read_table(tmp_path / "predicted.parquet")
    q = found["prediction"].to_numpy().astype(float)
    c, n = clicks[700:], impressions[700:]
    np.testing.assert_allclose(found["label"].to_numpy(), c / n, rtol=1e-6)
    y, weight, both = np.repeat([1, 0], 300), np.concatenate([c, n - c]), np.tile(q, 2)
    assert report["auc"] == pytest.approx(roc_auc_score(y, both, sample_weight=weight), abs=1e-6)
    assert report["auc"] > 0.8
    assert report["logloss"] == pytest.approx(log_loss(y, both, sample_weight=weight), rel=1e-5)
    assert report["calibration"] == pytest.approx((n * q).sum() / c.sum(), rel=1e-5)
    assert report["ctr"] == pytest.approx(c.sum() / n.sum(), rel=1e-6)
    assert 0.7 < report["calibration"] < 1.3
    of_ads, ads = evaluate(run, data, by=["ad"])["by"]["ad"], found["ad"].to_numpy(zero_copy_only=False)
    gauc, of_gauc, ndcg = 0.0, 0.0, []
    for chosen in (ads == ad for ad in set(ads)):
        own, of_classes = np.tile(chosen, 2) & (weight > 0), np.tile(chosen, 2)
        if len(set(y[own])) == 2:
            gauc += n[chosen].sum() * roc_auc_score(y[own], both[own], sample_weight=weight[own])
            of_gauc += n[chosen].sum()
            ndcg.append(ndcg_score([(c / n)[chosen]], [q[chosen]]) if of_classes.sum() > 2 else 1.0)
    assert of_ads["gauc"] == pytest.approx(gauc / of_gauc, abs=1e-6)
    assert of_ads["ndcg"] == pytest.approx(np.mean(ndcg), abs=1e-6)
    weighed = {line["model"]: line for line in baselines(data, tmp_path / "baseline", 1000)}
    assert all(line["auc"] > 0.7 and 0.7 < line["calibration"] < 1.3 for line in weighed.values())


@pytest.mark.parametrize("name", ["bce", "focal"])
def test_the_loss_of_counts_is_that_of_their_samples_one_by_one(name: str) -> None:
    """And so are the gradients; of float32 sums in another order."""
    loss: Loss = LOSSES[name]
    counts, totals = torch.tensor([0, 3, 5, 1]), torch.tensor([2, 4, 5, 9])
    logits = torch.tensor([-1.0, 0.5, 2.0, -0.25], requires_grad=True)

    def of(logits: Tensor, label: Tensor, weight: Tensor | None, mean_weight: float) -> Tensor:
        batch = Batch(torch.empty(len(label), 0), None, label, weight=weight)  # type: ignore[arg-type]
        return MeanLoss(1, loss, mean_weight)(logits, batch)[0]

    together = of(logits, counts / totals, totals.float(), float(totals.float().mean()))
    index = torch.arange(4).repeat_interleave(totals)
    labels = torch.cat([(torch.arange(int(n)) < c).float() for c, n in zip(counts, totals, strict=True)])
    apart = of(logits[index], labels, None, 1.0)
    torch.testing.assert_close(together, apart)
    torch.testing.assert_close(*(torch.autograd.grad(value, logits)[0] for value in (together, apart)))


FIELDS = 'fields = [{name = "shop", kind = "categorical"}]'
COUNTS = f'label = {{count = "clicks", of = "shown"}}\n{FIELDS}'
WRONG = {
    "a,4,3": "column clicks: a count must be a number from 0 to its total in column 'shown', got '4'",
    "a,-1,3": "column clicks: a count must be a number from 0 to its total in column 'shown', got '-1'",
    "a,0,0": "column shown: the total of a count must be a finite number of at least 1, got '0'",
    "a,0,": "column shown: the total of a count must be a finite number of at least 1, got ''",
    "a,,3": "column clicks: the label is missing",
    "a,1,2e6": "column shown: weights must be at most 1,000,000",
}


@pytest.mark.parametrize("row", WRONG)
def test_counts_that_cannot_be_are_bad_rows(tmp_path: Path, row: str) -> None:
    text = f"shop,clicks,shown\nb,1,4\n{row}\na,0,1\n"
    refused(f"line 3, {WRONG[row]}.*on_bad_row", prepare_text, tmp_path, COUNTS, text)
    prepare_text(tmp_path, COUNTS, text, config=PrepareConfig(test_fraction=0, on_bad_row="skip"))
    columns = read_split(tmp_path / "out", "train")
    assert (columns["label"], columns["sample_weight"]) == ([0.25, 0.0], [4.0, 1.0])


def test_rates_are_read_and_advice_names_them(tmp_path: Path) -> None:
    text = "shop,ctr,w\na,0.0039,2\nb,1,3\n"
    with pytest.raises(ValueError, match="a label must be 0 or 1") as error:
        prepare_text(tmp_path, f'label = "ctr"\n{FIELDS}', text)
    advice = str(error.value).partition("write ")[2]
    assert advice == 'label = {column = "ctr", kind = "rate"}'
    schema = prepare_text(tmp_path, f'{advice}\nweight = "w"\n{FIELDS}', text)
    columns = read_split(tmp_path / "out", "train")
    assert (columns["label"], columns["sample_weight"]) == ([pytest.approx(0.0039), 1.0], [2, 3])
    assert schema.splits["train"].positives == (pytest.approx(3.0078),)
    refused(
        "a rate must be a number from 0 to 1, got '1.5'.*on_bad_row", prepare_text, tmp_path, f"{advice}\n{FIELDS}",
        "shop,ctr\na,1.5\n", output="x",
    )  # fmt: skip
    config = PrepareConfig(negative_fraction=0.5)
    for toml in (f"{advice}\n{FIELDS}", COUNTS):
        refused(
            "a rate or count", prepare_text, tmp_path, toml, "shop,ctr,clicks,shown\na,1,1,1", config=config, output="y"
        )
    for toml, message in (
        (f'label = {{count = "clicks"}}\n{FIELDS}', "count and of go together"),
        (f'label = {{column = "x", kind = "share"}}\n{FIELDS}', 'kind must be "rate"'),
        (f"label = 3\n{FIELDS}", "label must be a column, or a table"),
        (f"{advice}\nthreshold = 0.5\n{FIELDS}", "positive and threshold are for classes"),
        (f'labels = [{{name = "a", count = "a", of = "b"}}, "c"]\n{FIELDS}', "must be the only one"),
        (COUNTS.replace('"shop"', '"shown"'), "column 'shown' is the label"),
    ):
        refused(message, prepare_text, tmp_path, toml, text)


def test_new_samples_have_counts_or_none(tmp_path: Path) -> None:
    prepare_text(tmp_path, COUNTS, "shop,clicks,shown\na,1,4\nb,0,1\n")
    for name, text, labels, weights in (
        ("both", "shop,clicks,shown\na,1,2\nb,3,2\na,,5\n", [0.5, np.nan, np.nan], [2, 2, 5]),
        ("one", "shop,shown\na,1\n", [np.nan], []),
        ("none", "shop\na\n", [np.nan], []),
    ):
        (tmp_path / f"{name}.csv").write_text(text)
        schema = prepare("tabular", [tmp_path / f"{name}.csv"], tmp_path / name, like=tmp_path / "out")
        columns = read_split(tmp_path / name, "test")
        np.testing.assert_array_equal(columns["label"], labels)
        assert (columns["sample_weight"], schema.splits["test"].labelled) == (weights, name == "both")


def table_of_counts(rows: int) -> pa.Table:
    draw = np.random.default_rng(3)
    shop, shown = draw.integers(0, 9, rows), draw.integers(1, 6, rows)
    columns: dict[str, Any] = {
        "time": 1_700_000_000 + 600 * np.arange(rows),
        "shop": [f"s{shop_id}" for shop_id in shop],
    }
    columns |= {"clicks": draw.binomial(shown, (1 + shop) / 11), "impressions": shown}
    return pa.table(columns)


def test_inferred_counts_and_rates(tmp_path: Path) -> None:
    table = table_of_counts(300)
    ctr = pa.array(table["clicks"].to_numpy() / table["impressions"].to_numpy())
    pq.write_table(table.append_column("ctr", ctr), tmp_path / "raw.parquet")
    found = infer_schema(tmp_path / "raw.parquet", label="ctr")
    assert (found.label.text, found.rule) == ('label = {column = "ctr", kind = "rate"}', None)
    pq.write_table(table, tmp_path / "raw.parquet")
    found = infer_schema(tmp_path / "raw.parquet")
    assert (found.label.text, found.rule) == ('label = {count = "clicks", of = "impressions"}', None)
    assert found.label.doubts == ["is 'clicks' the number of positives of 'impressions'?"]
    assert [field.keys["name"] for field in found.fields] == ["shop"]
    less = table.set_column(2, "clicks", [table["clicks"].to_numpy() + 3])
    pq.write_table(less, tmp_path / "raw.parquet")
    assert "threshold" in str(infer_schema(tmp_path / "raw.parquet", label="clicks").rule)


def test_a_stream_of_counts_is_trained_and_measured_by_their_totals(tmp_path: Path) -> None:
    table = table_of_counts(300)
    pq.write_table(table, tmp_path / "raw.parquet")
    (tmp_path / "columns.toml").write_text(
        f'time = "time"\nlabel = {{count = "clicks", of = "impressions"}}\n{FIELDS}', encoding="utf-8"
    )
    config = PrepareConfig(split="order", test_rows=50)
    prepare("tabular", [tmp_path / "raw.parquet"], tmp_path / "data", config, schema_file=tmp_path / "columns.toml")
    codec = SampleCodec.load(tmp_path / "data")
    rows = table.to_pylist()
    encoded = codec.encode(codec.from_objects([*rows[:9], {**rows[9], "clicks": 9}, {**rows[10], "impressions": 0}]))
    assert [bad_sample.index for bad_sample in encoded.bad] == [9, 10]
    np.testing.assert_array_equal(encoded.batch.weight, table["impressions"].to_numpy()[:9])
    of_table = codec.encode(codec.from_table(table.slice(0, 9)))
    assert of_table.table.equals(encoded.table)
    unlabelled = codec.encode(codec.from_objects([{"shop": "s1"}], training=False), training=False)
    assert unlabelled.block.weight is None
    write_stream(tmp_path / "in", [table.slice(0, 200), table.slice(200)])
    (tmp_path / "run.toml").write_text(CONFIG)
    given = ["train.batch_size=50", "online.window=1000d"]
    settings = load_config(tmp_path / "run.toml", given)
    online(settings, tmp_path / "data", str(tmp_path / "in"), tmp_path / "run")
    (window,) = metrics(tmp_path / "run", "window")
    clicks, shown = (table[name].to_numpy() for name in ("clicks", "impressions"))
    assert window["samples"] == 300
    assert window["ctr"] == pytest.approx(clicks.sum() / shown.sum(), rel=1e-6)
