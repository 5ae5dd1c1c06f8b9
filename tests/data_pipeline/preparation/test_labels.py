"""Labels, sample weights, sample numbers and kept columns, against a plain reading of the same rows."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cowrec.data_pipeline import PrepareConfig, Reader, Schema, prepare
from cowrec.data_pipeline.raw.layouts import RawLabel
from raw_cases import prepare_text, read_split
from refusal import refused

WRONG = "wrong"


def number(text):
    try:
        return float(text)
    except ValueError:
        return None


def expected(text, label):
    """The documented rules, one value at a time."""
    value = number(text)
    if text == "" or text in label.null or (value is not None and value in map(number, label.null)):
        return None
    if label.positive:
        return float(text in label.positive or (value is not None and value in map(number, label.positive)))
    if label.threshold is not None:
        return WRONG if value is None else float(value >= label.threshold)
    if value in (0, 1) or text.lower() in ("true", "false"):
        return float(value == 1 or text.lower() == "true")
    return WRONG


LABELS = [RawLabel(), RawLabel(threshold=3.5), RawLabel(threshold=-2)]
LABELS += [RawLabel(threshold=1, null=("-1",)), RawLabel(positive=("4",), null=("no", "-1.50"))]
LABELS += [RawLabel(positive=("1",)), RawLabel(positive=("yes", "4", "-1.50"))]
NUMBERS = ["0", "1", "1.0", "0.0", "-0", "1e0", "4", "04", "-1", "4.0", "-1.5", "3.5", "3.49"]
TEXTS = ["", "true", "False", "TRUE", "yes", "YES", "no", "x"]


@given(st.lists(st.sampled_from(NUMBERS + TEXTS), max_size=12))
def test_values_of_labels_follow_the_rules(column):
    for label in LABELS:
        values, wrong = label.values(pa.array(column, pa.string()))
        for text, value, is_wrong in zip(column, values.tolist(), wrong.tolist(), strict=True):
            wanted = expected(text, label)
            assert is_wrong == (wanted == WRONG)
            assert math.isnan(value) if wanted in (None, WRONG) else value == wanted


@pytest.fixture
def prepared(tmp_path):
    """Prepares rows of a file with these columns; returns the schema and the columns of the training samples."""

    def run(toml, header, rows, output="out", **arguments):
        toml += '\n[[fields]]\nname = "shop"\nkind = "categorical"'
        schema = prepare_text(tmp_path, toml, "\n".join([header, *rows]), output=output, **arguments)
        return schema, read_split(tmp_path / output, "train")

    return run


def test_several_labels_weights_numbers_and_kept_columns(prepared, tmp_path):
    toml = 'labels = ["click", {name = "long", column = "seconds", threshold = 30}]\nnull = ["NA"]\nweight = "w"\n'
    rows = ["a,1,29.5,0.5,u 1", "b,0,30,2,", "a,x,1,1,u 3", "a,NA,31,0,u 4", "b,true,,1e-3,u 5"]
    options = {"config": PrepareConfig(test_fraction=0, on_bad_row="skip"), "keep": ["seconds"]}
    schema, columns = prepared(toml + 'keep = ["user id"]', "shop,click,seconds,w,user id", rows, **options)
    assert schema.labels == ("click", "long")
    assert (schema.sample_weights, schema.numbered, schema.kept) == (True, True, ("user id", "seconds"))
    nan = pytest.approx(math.nan, nan_ok=True)
    assert columns["label_click"] == [1, 0, nan, 1]
    assert columns["label_long"] == [0, 1, 1, nan]
    assert columns["sample_weight"] == pytest.approx([0.5, 2, 0, 1e-3])
    assert columns["sample_number"] == [0, 1, 3, 4], "the bad row counts"
    assert columns["kept_user id"] == ["u 1", "", "u 4", "u 5"]
    assert columns["kept_seconds"] == ["29.5", "30", "31", ""]
    assert schema.splits["train"].positives == pytest.approx((0.501, 2))
    assert schema.splits["train"].weight == pytest.approx(2.501)
    assert Schema.load(tmp_path / "out") == schema
    batch = next(Reader(tmp_path / "out", "train", batch_size=4).epoch(0))
    assert batch.label.shape == (4, 2)
    # New samples: with fewer columns, then with a column to keep.
    (tmp_path / "new.csv").write_text("shop,user id\nb,u 9\nc,\n")
    schema = prepare("tabular", [tmp_path / "new.csv"], tmp_path / "new", like=tmp_path / "out")
    columns = read_split(tmp_path / "new", "test")
    assert (schema.sample_weights, schema.kept, schema.splits["test"].labelled) == (False, ("user id",), False)
    assert (columns["shop"], columns["kept_user id"]) == ([3, 0], ["u 9", ""])
    with pytest.raises(ValueError, match=r"no column 'nothing' to keep in .*new\.csv"):
        prepare("tabular", [tmp_path / "new.csv"], tmp_path / "newer", like=tmp_path / "out", keep=["nothing"])


def test_one_class_is_refused_and_no_advice_drops_the_other(prepared):
    rows = ["a,1", "b,-1", "a,1", "b,-1"]
    with pytest.raises(ValueError, match=r'line 3, column label: .*got \'-1\'. .* positive = \["1"\]') as error:
        prepared("", "shop,label", rows)
    assert "skip" not in str(error.value)
    with pytest.raises(ValueError, match="of one class, 2 positive and 0 negative; 2 bad rows were left out"):
        prepared("", "shop,label", rows, config=PrepareConfig(test_fraction=0, on_bad_row="skip"))
    assert prepared('positive = [1, "2"]', "shop,label", rows)[1]["label"] == [1, 0, 1, 0]
    assert prepared("threshold = 1", "shop,label", rows, "o")[1]["label"] == [1, 0, 1, 0]
    with pytest.raises(ValueError, match="'buy': the training samples are of one class, 0 positive and 1 negative"):
        prepared('labels = ["label", "buy"]', "shop,label,buy", ["a,1,0", "b,0,"], "other")
    with pytest.raises(ValueError, match="line 2, column label: the label is missing, got ''\\. To skip and count"):
        prepared("", "shop,label", ["a,"], "missing")


NEGATIVES = [
    ('positive = ["yes"]', "yes|no|no|yes", "no|Yes", "'no' (3 samples), 'Yes' (1 samples)"),
    ('positive = ["4", "5"]', "3|4|5|1", "3|NA", "'3' (2 samples), '1' (1 samples), 'NA' (1 samples)"),
    ('positive = ["yes"]\nnull = ["NA"]', "yes|no|no|NA", "no|yes", ""),
]


@pytest.mark.parametrize(("rule", "train", "test", "listed"), NEGATIVES)
def test_texts_that_count_as_negative_are_listed(tmp_path, caplog, rule, train, test, listed):
    """Those of all files, where there are several; other numbers of a scale are meant to be negative."""
    toml = f'label = "end"\n{rule}\nfields = [{{name = "shop", kind = "categorical"}}]'
    files = ["end,shop\n" + "".join(f"{label},a\n" for label in labels.split("|")) for labels in (train, test)]
    options = {"on_bad_row": "skip", "split": "order", "test_rows": 2}
    prepare_text(tmp_path, toml, *files, config=PrepareConfig(**options))
    found = [message for message in caplog.messages if "count as negative" in message]
    assert len(found) == bool(listed)
    assert all(
        f"column 'end': {listed.count('sample')} texts count as negative: {listed}" in message for message in found
    )
    single = "label 'end': all 2 samples of the split test are not positive, so that its AUC cannot be measured"
    assert (single in caplog.messages) == ("yes" not in test and "4" not in test)


@pytest.mark.parametrize(("rows", "kind"), [(1_100_000, "sorted"), (1_100_000, "drifting")])
def test_training_samples_in_the_order_of_their_label_are_reported(tmp_path, caplog, rows, kind):
    """Where windows do not mix them; a share that goes from 0 to 60 % in time is none."""
    numbers = np.arange(rows)
    limit = np.where(numbers < 0.3 * rows, 1, 0) if kind == "sorted" else 0.6 * numbers / rows
    label = pa.array((np.random.default_rng(0).random(rows) < limit).astype(np.int8))
    pq.write_table(pa.table({"click": label, "shop": pa.array(numbers % 7)}), tmp_path / "raw.parquet")
    (tmp_path / "columns.toml").write_text('label = "click"\nfields = [{name = "shop", kind = "categorical"}]')
    config, columns = PrepareConfig(test_fraction=0, validation_fraction=0), tmp_path / "columns.toml"
    prepare("tabular", [tmp_path / "raw.parquet"], tmp_path / "out", config, schema_file=columns)
    found = [message for message in caplog.messages if "sorted" in message]
    assert len(found) == (kind == "sorted")
    assert all("30 % of the training samples are positive, but from 0 to 100 %" in message for message in found)
    assert all("window_rows = 1100000, which mixes all" in message for message in found)


BAD = "line 2, column w: a sample weight must be a finite number of at least 0"
LARGE = "line 2, column w: weights must be at most 1,000,000, since one sample could end training otherwise, got '1e3"
WEIGHTS = [(f"a,1,{weight}|b,0,1", 0, BAD) for weight in ("-1", "", "nan", "inf", "heavy")]
WEIGHTS += [(f"a,1,{weight}|b,0,1", 0, LARGE) for weight in ("1e30", "1e39")]
WEIGHTS += [("a,1,0|b,0,0", 0, "column 'w': all 2 training samples have weight 0")]
WEIGHTS += [("a,1,1|b,0,0|b,1,0", 1, "column 'w': all 1 samples of the split test have weight 0")]


@pytest.mark.parametrize(("rows", "test_rows", "message"), WEIGHTS)
def test_bad_weights_and_splits_without_weight_are_refused(prepared, rows, test_rows, message):
    config = PrepareConfig(split="order", test_rows=test_rows)
    refused(message, prepared, 'weight = "w"', "shop,label,w", rows.split("|"), config=config)


def test_samples_to_predict_need_no_valid_label_or_weight(prepared, tmp_path, caplog):
    """They keep what is done about bad rows; the screen says what is unknown."""
    lines = [f"{'ab'[n % 2]},{n % 2},1.5" for n in range(10)]
    config = PrepareConfig(test_fraction=0, on_bad_row="skip")
    prepared('weight = "w"', "shop,label,w", ["b,1", *lines], config=config)
    # A good row, no label, a wrong one, three wrong weights, and a row of too few columns.
    rows = ["a,1,2", "b,,1", "new,-1,1", "a,0,-1", "a,0,", "new,0,1e9", "a"]
    (tmp_path / "new.csv").write_text("\n".join(["shop,label,w", *rows]))
    schema = prepare("tabular", [tmp_path / "new.csv"], tmp_path / "new", like=tmp_path / "out")
    columns = read_split(tmp_path / "new", "test")
    assert columns["label"] == pytest.approx([1, math.nan, math.nan, 0, 0, 0], nan_ok=True)
    assert columns["sample_weight"] == [2, 1, 1, 0, 0, 0]
    test = schema.splits["test"]
    assert (test.positives, test.weight, sum(schema.bad_rows.values())) == ((2,), 4, 1)
    assert [record.message.partition(";")[0] for record in caplog.records] == [
        "column 'label': 2 samples have no valid label",
        "field 'shop': 2 of its ids were not seen in training, or too rarely",
        "column 'w': 3 samples have no valid weight",
    ]
    (tmp_path / "none.csv").write_text("shop,label,w\na,,1\nb,?,\n")
    schema = prepare("tabular", [tmp_path / "none.csv"], tmp_path / "none", like=tmp_path / "out")
    assert (schema.splits["test"].rows, schema.splits["test"].labelled) == (2, False)
    config = PrepareConfig(on_bad_row="error")
    with pytest.raises(ValueError, match="line 8: 1 columns, must be 3"):
        prepare("tabular", [tmp_path / "new.csv"], tmp_path / "x", config, like=tmp_path / "out")
