"""Messages about settings, counts, schema files and addresses: each names the problem, the value and the remedy."""

import pytest

from cowrec.data_pipeline import PrepareConfig, SparseField, SynthesizeConfig, open_source, prepare
from cowrec.data_pipeline.raw.layouts import load_schema_file
from cowrec.data_pipeline.synthetic.criteo_ids import CriteoIds
from cowrec.data_pipeline.synthetic.drifting import DriftConfig
from cowrec.names import parse_count
from refusal import refused

SETTINGS = [
    (PrepareConfig, {"min_count": 0}, "min_count must be at least 1, got 0"),
    (PrepareConfig, {"hash_buckets": -1}, "hash_buckets must be from 0 to"),
    (PrepareConfig, {"hash_buckets": 9, "min_count": 2}, "min_count has no effect with hash_buckets"),
    (PrepareConfig, {"raw_ids": True, "max_ids": 9}, "max_ids has no effect with raw_ids"),
    (PrepareConfig, {"raw_ids": True, "hash_buckets": 9}, "hash_buckets and raw_ids exclude each other"),
    (PrepareConfig, {"dense": "standard"}, "dense must be one of quantile, minmax, log, buckets, none, got 'standard'"),
    (PrepareConfig, {"split": "order", "test_rows": 5, "test_fraction": 0.1}, "test_rows and test_fraction exclude"),
    (PrepareConfig, {"test_rows": 5}, 'test_rows is for split = "order"; with "random" give fractions'),
    (PrepareConfig, {"split": "order", "validation_rows": 5}, "validation_rows needs test_rows, where the test split"),
    (PrepareConfig, {"split": "order", "test_rows": -5}, "test_rows must be at least 0"),
    (PrepareConfig, {"split": "order", "test_from": 5}, 'test_from is for split = "time"'),
    (PrepareConfig, {"split": "time", "test_from": "soon"}, "test_from = 'soon': a time must be Unix"),
    (PrepareConfig, {"split": "time", "test_from": 5, "validation_from": "5"}, "validation_from must be before"),
    (PrepareConfig, {"test_fraction": 0.5, "validation_fraction": 0.5}, "must be less than 1, got 0.5 + 0.5"),
    (PrepareConfig, {"test_fraction": 1.0}, "test_fraction must be in [0, 1), got 1.0"),
    (PrepareConfig, {"negative_fraction": 0}, "negative_fraction must be in (0, 1], got 0"),
    (SynthesizeConfig, {"rows": 0}, "rows must be at least 1, got 0"),
    (SynthesizeConfig, {"ctr": 1.0}, "ctr must be between 0 and 1, got 1.0"),
    (SynthesizeConfig, {"vocabulary_scale": 0.0}, "vocabulary_scale must be in (0, 100], got 0.0"),
    (SynthesizeConfig, {"skew": -1.0}, "skew must be finite and at least 0, got -1.0"),
    (SynthesizeConfig, {"seed": -1}, "seed must be at least 0, got -1"),
    (DriftConfig, {"rows": 0}, "rows must be at least 1, got 0"),
    (DriftConfig, {"days": 0.0}, "days must be finite and above 0, got 0.0"),
    (DriftConfig, {"lifetime_days": float("inf")}, "lifetime_days must be finite and above 0, got inf"),
    (DriftConfig, {"num_dense": -1}, "num_dense must be at least 0, got -1"),
    (DriftConfig, {"ctr": 1.0}, "ctr must be between 0 and 1, got 1.0"),
    (DriftConfig, {"new_id_share": 1.5}, "new_id_share must be in [0, 1], got 1.5"),
    (DriftConfig, {"core_ids": (1,), "new_ids_per_day": (1, 2)}, "one number per field and at least one field, got 1"),
    (DriftConfig, {"core_ids": (0,), "new_ids_per_day": (0,)}, "field 1 must have core ids or new ids, got 0 and 0"),
    (CriteoIds, {"max_rows": 1}, "tables need at least 2 rows, got 1"),
    (SparseField, {"name": "a", "num_embeddings": 0}, "num_embeddings must be at least 2"),
    (SparseField, {"name": "a", "num_embeddings": 1, "encoding": "hash"}, "num_embeddings must be at least 2"),
    (SparseField, {"name": "a", "num_embeddings": 1, "encoding": "raw"}, "num_embeddings must be at least 2"),
    (open_source, {"address": "redis://127.0.0.1:1/0"}, "must name a stream"),
    (open_source, {"address": "kafka://broker:1"}, "must be kafka://broker"),
    (open_source, {"address": "kafka://b:1/t?auto.offset.reset=latest"}, "offset.reset of the address must be error"),
    (open_source, {"address": "kafka://b:1/t?topic.auto.offset.reset=latest"}, "offset.reset of the address must be"),
    (open_source, {"address": "kafka://b:1/t?error_cb=x"}, "the address has settings that are none of text"),
    (open_source, {"address": "kafka://b:1/t?enable.partition.eof=no"}, "partition.eof of the address must be true"),
    (open_source, {"address": "http://somewhere/"}, "must be a folder, redis:// or kafka://, got http://"),
    (open_source, {"address": "no/such/folder"}, "is not a folder"),
]


@pytest.mark.parametrize(("made", "settings", "message"), SETTINGS)
def test_settings_are_checked(made, settings, message):
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        made(**settings)
    assert message in str(error.value)


FIELD = '[[fields]]\nname = "x"\nkind = "categorical"\n'
NUMBER = "[[fields]]\nname = 'x'\nkind = 'numeric'\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("delimiter = ''\n" + FIELD, "delimiter must be at least one character"),
        ("delimiter = ';;'\n" + FIELD, "';;' is more than one ASCII character, so quotes have no meaning: set quote"),
        ("separator = ';'\n" + FIELD, "unknown key 'separator'; the keys are delimiter"),
        ("header = 'no'\n" + FIELD, "header must be of type bool, got 'no'"),
        ("header = false\n" + FIELD, "give `columns` if, and only if, header = false"),
        ("header = false\ncolumns = ['label', 'y']\n" + FIELD, "no column 'x' among label, y"),
        ("", "at least one field"),
        ("[[fields]]\nname = 'x'\n", "fields entry 1 needs a name and a kind"),
        (NUMBER.replace("numeric", "date"), "numeric, categorical, multi, sequence, weighted, got 'date'"),
        (FIELD + "weight_separator = ':'", "weight_separator is for the kind weighted only"),
        (FIELD + "separator = '|'", "separator is for list kinds only"),
        (FIELD + "pooling = 'mean'", "pooling is for the kinds multi and weighted"),
        (FIELD + "size = 3", "fields entry 1: unknown key 'size'"),
        (FIELD + FIELD, "field names must differ"),
        (NUMBER.replace("x", "label"), "this name is taken"),
        ("label = 'x'\n" + FIELD, "column 'x' is the label"),
        (NUMBER + "transform = 'sqrt'", "transform must be one of quantile, minmax,"),
        (FIELD + "transform = 'log'", "for numeric fields; got 'log'"),
        (FIELD + "min_count = -1", "field 'x': min_count must be at least 1"),
        (NUMBER + "max_ids = 5", "max_ids must be at least 1, and is for ids only"),
        (FIELD + "max_ids = true", "max_ids must be of type int, got True"),
        ("null = 'NA'\n" + FIELD, "null must be a list of strings or numbers, got"),
        (FIELD + "null = [[0]]", r"fields entry 1: null must be a list of strings or numbers, got \[\[0\]\]"),
        ("labels = ['a']\nlabel = 'b'\n" + FIELD, "labels replaces label"),
        ("labels = ['a']\nthreshold = 1\n" + FIELD, "give positive and threshold in its entries"),
        ("labels = ['a', {column = 'b'}]\n" + FIELD, "labels entry 2 must be a column or have a name"),
        ("labels = ['a', 'a']\n" + FIELD, "labels must be one name or several different ones"),
        ("labels = []\n" + FIELD, "labels must be one name"),
        ("threshold = nan\n" + FIELD, "threshold must be a finite number"),
        ("threshold = 1\npositive = ['1']\n" + FIELD, "give positive or threshold, not both"),
        ("weight = 'label'\n" + FIELD, "column 'label' is a label, so it cannot be the time or the weight"),
        ("time = 'label'\n" + FIELD, "column 'label' is a label, so it cannot be the time"),
        ("time = 'at'\n" + NUMBER.replace("'x'", "'time'"), "'time': this name is reserved for the time"),
        (FIELD.replace('"x"', '"sample_number"'), "'sample_number': this name is reserved for the"),
        ("weight = 'w'\n" + FIELD.replace('"x"', '"sample_weight"'), "reserved for the weight of samples; choose"),
        ("keep = ['x']\n" + FIELD.replace('"x"', '"kept_x"'), "reserved for the column 'x' that is kept; choose"),
        ("labels = ['a', 'b']\n" + FIELD.replace('"x"', '"label_a"'), "reserved for the label 'a'; choose another"),
        (NUMBER + "transform = 'buckets'\n" + FIELD.replace('"x"', '"x_bucket"'), "for the buckets of field 'x'; ch"),
        ("label = ", "is not valid TOML"),
    ],
)
def test_schema_files_are_checked(tmp_path, text, message):
    (tmp_path / "schema.toml").write_text(text)
    refused(r"schema\.toml.*" + message, load_schema_file, tmp_path / "schema.toml")


def test_buckets_of_all_numbers_may_take_a_name(tmp_path):
    (tmp_path / "raw.csv").write_text("label,x,x_bucket\n1,2,a\n0,3,b\n")
    (tmp_path / "schema.toml").write_text(NUMBER + FIELD.replace('"x"', '"x_bucket"'))
    inputs = ("tabular", [tmp_path / "raw.csv"], tmp_path / "out", PrepareConfig(dense="buckets"))
    message = "'x_bucket': this name is reserved for the buckets of field 'x'; choose another, and give"
    refused(message, prepare, *inputs, schema_file=tmp_path / "schema.toml")


@pytest.mark.parametrize(
    ("text", "number"),
    [("512", 512), ("64K", 65536), (" 64k", 65536), ("1_000", 1000), ("1M", 1 << 20), ("4G", 1 << 32), ("-1", -1)],
)
def test_units_are_powers_of_1024(text: str, number: int) -> None:
    assert parse_count(text, "--rows") == number


@pytest.mark.parametrize("text", ["", "K", "8Q", "1.5K", "8KB", "1e6", "1,000", "_1", "2 K"])
def test_other_texts_are_refused(text: str) -> None:
    refused(r"--rows must be a whole number such as 512, 64K or 1M \(K is 1,024, M is", parse_count, text, "--rows")
