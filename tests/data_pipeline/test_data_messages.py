"""Messages about settings, counts, schema files and addresses: each names the problem, the value and the remedy."""

import pytest

from cowrec.data_pipeline import PrepareConfig, SparseField, SynthesizeConfig, open_source
from cowrec.data_pipeline.raw.layouts import FIELD_KINDS
from cowrec.data_pipeline.raw.schema_file import load_schema_file
from cowrec.data_pipeline.synthetic.drifting import DriftConfig
from cowrec.names import parse_count
from refusal import refused

SETTINGS = [
    (PrepareConfig, {"min_count": 0}, "min_count must be at least 1, got 0"),
    (PrepareConfig, {"hash_buckets": 9, "min_count": 2}, "min_count has no effect with hash_buckets"),
    (PrepareConfig, {"raw_ids": True, "hash_buckets": 9}, "hash_buckets and raw_ids exclude each other"),
    (PrepareConfig, {"split": "order", "test_rows": 5, "test_fraction": 0.1}, "test_rows and test_fraction exclude"),
    (PrepareConfig, {"test_rows": 5}, 'test_rows is for split = "order"; with "random" give fractions'),
    (PrepareConfig, {"split": "order", "validation_rows": 5}, "validation_rows needs test_rows, where the test split"),
    (PrepareConfig, {"split": "time", "test_from": "soon"}, "test_from = 'soon': a time must be Unix"),
    (PrepareConfig, {"test_fraction": 0.5, "validation_fraction": 0.5}, "must be less than 1, got 0.5 + 0.5"),
    (PrepareConfig, {"negative_fraction": 0}, "negative_fraction must be in (0, 1], got 0"),
    (SynthesizeConfig, {"ctr": 1.0}, "ctr must be between 0 and 1, got 1.0"),
    (SynthesizeConfig, {"seed": -1}, "seed must be at least 0, got -1"),
    (DriftConfig, {"rows": 0}, "rows must be at least 1, got 0"),
    (DriftConfig, {"core_ids": (1,), "new_ids_per_day": (1, 2)}, "one number per field and at least one field, got 1"),
    (SparseField, {"name": "a", "num_embeddings": 0}, "num_embeddings must be at least 2"),
    (open_source, {"address": "redis://127.0.0.1:1/0"}, "must name a stream"),
    (open_source, {"address": "kafka://broker:1"}, "must be kafka://broker"),
    (open_source, {"address": "kafka://b:1/t?auto.offset.reset=latest"}, "offset.reset of the address must be error"),
    (open_source, {"address": "http://somewhere/"}, "must be a folder, redis:// or kafka://, got http://"),
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
        ("encoding = 'utf-16'\n" + FIELD, "only UTF-8 and encodings that extend ASCII are read; convert the file"),
        ("encoding = 'western'\n" + FIELD, "encoding = 'western' is unknown; write one of Python's"),
        ("decimal = ';'\n" + FIELD, 'decimal must be "." or ",", got'),
        ("header = 'no'\n" + FIELD, "header must be of type bool, got 'no'"),
        ("header = false\n" + FIELD, "give `columns` if, and only if, header = false"),
        ("", "at least one field"),
        (NUMBER.replace("numeric", "date"), f"kind must be one of {', '.join(FIELD_KINDS)}, got 'date'"),
        (FIELD + "separator = '|'", "separator is for the kinds vector, multi, sequence, weighted, not for"),
        (FIELD + "size = 3", "fields entry 1: unknown key 'size'"),
        (FIELD + FIELD, "field names must differ"),
        (NUMBER.replace("x", "label"), "this name is taken"),
        ("label = 'x'\n" + FIELD, "column 'x' is the label"),
        (FIELD + "transform = 'log'", "transform is for the kinds numeric, vector, not for categorical"),
        ("null = 'NA'\n" + FIELD, "null must be a list of strings or numbers, got"),
        ("labels = ['a']\nlabel = 'b'\n" + FIELD, "labels replaces label"),
        ("labels = ['a', {column = 'b'}]\n" + FIELD, "labels entry 2 must be a column or have a name"),
        ("threshold = nan\n" + FIELD, "threshold must be a finite number"),
        ("threshold = 1\npositive = ['1']\n" + FIELD, "give positive or threshold, not both"),
        ("time = 'label'\n" + FIELD, "column 'label' is a label, so it cannot be the time"),
        (FIELD.replace('"x"', '"sample_number"'), "'sample_number': this name is reserved for the"),
        (NUMBER + "transform = 'buckets'\n" + FIELD.replace('"x"', '"x_bucket"'), "for the buckets of field 'x'; ch"),
    ],
)
def test_schema_files_are_checked(tmp_path, text, message):
    (tmp_path / "schema.toml").write_text(text)
    refused(r"schema\.toml.*" + message, load_schema_file, tmp_path / "schema.toml")


@pytest.mark.parametrize(
    ("text", "number"),
    [("512", 512), ("64K", 65536), (" 64k", 65536), ("1_000", 1000), ("1M", 1 << 20), ("4G", 1 << 32), ("-1", -1)],
)
def test_units_are_powers_of_1024(text: str, number: int) -> None:
    assert parse_count(text, "--rows") == number


@pytest.mark.parametrize("text", ["", "K", "8Q", "1.5K", "8KB", "1e6", "1,000", "_1", "2 K"])
def test_other_texts_are_refused(text: str) -> None:
    refused(r"--rows must be a whole number such as 512, 64K or 1M \(K is 1,024, M is", parse_count, text, "--rows")
