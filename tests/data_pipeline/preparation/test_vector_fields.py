"""Vectors, such as pretrained embeddings: files, tables in memory, streams and requests, to the same numbers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cowrec.data_pipeline import PrepareConfig, SampleCodec, Schema, infer_schema, prepare
from cowrec.data_pipeline.raw.layouts import RawField
from raw_cases import prepare_text, read_split
from refusal import refused

WIDTH = 3
VECTORS = [[0.5, -1.25, 3.0], None, [1e-3, 0.0, -7.0], [2.0, 4.0, 8.0]]
NAMES = [f"emb[{element}]" for element in range(WIDTH)]
SCHEMA = """
label = "click"
fields = [
    {name = "emb", column = "item emb", kind = "vector", width = 3, separator = ","},
    {name = "price", kind = "numeric"},
    {name = "shop", kind = "categorical"},
]
"""
EXPECTED = np.array([[0.0] * WIDTH if numbers is None else numbers for numbers in VECTORS], np.float32)


def rows(vectors: list[Any]) -> list[dict[str, Any]]:
    return [
        {"click": n % 2, "item emb": vector, "price": float(n), "shop": f"s{n % 3}"} for n, vector in enumerate(vectors)
    ]


def prepared(folder: Path, columns: dict[str, Any], schema: str = SCHEMA, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), folder / "raw.parquet")
    (folder / "columns.toml").write_text(schema)
    settings = PrepareConfig(test_fraction=0, **config)
    prepare("tabular", [folder / "raw.parquet"], folder / "out", settings, schema_file=folder / "columns.toml")
    return folder / "out"


def of_files(folder: Path) -> np.ndarray:
    columns = read_split(folder, "train")
    return np.array([columns[name] for name in NAMES], np.float32).T


def as_columns(vectors: pa.Array) -> dict[str, Any]:
    samples = rows(vectors.to_pylist())
    return {name: [sample[name] for sample in samples] for name in samples[0]} | {"item emb": vectors}


KINDS = [
    pa.list_(pa.float32()),
    pa.large_list(pa.float64()),
    pa.list_(pa.float32(), WIDTH),
    pa.list_(pa.float16(), WIDTH),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_lists_of_any_type_are_the_numbers_of_the_data_set(tmp_path: Path, kind: pa.DataType) -> None:
    vectors = pa.array(VECTORS, pa.list_(pa.float32())).cast(pa.list_(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        vectors = pa.array(
            [None if vector is None else np.array(vector, kind.value_type.to_pandas_dtype()) for vector in VECTORS],
            kind,
        )
    data = prepared(tmp_path, as_columns(vectors))
    exact = np.float16 if pa.types.is_float16(kind.value_type) else np.float32
    np.testing.assert_array_equal(of_files(data), EXPECTED.astype(exact).astype(np.float32))
    schema = Schema.load(data)
    assert [(field.name, field.source, field.element) for field in schema.dense[:WIDTH]] == [
        (name, "emb", element) for element, name in enumerate(NAMES)
    ]


@pytest.mark.parametrize(
    "texts",
    [
        ["0.5,-1.25,3", "", "1e-3,0,-7", "2,4,8"],
        ["[0.5, -1.25, 3.0]", "[]", "(0.001, 0, -7.)", "{ 2 ,4,8}"],
        ["0.5, -1.25, 3.0", "NA", ".001,0,-7", "2,4,8"],
    ],
)
def test_text_of_vectors_is_read_as_lists_are(tmp_path: Path, texts: list[str]) -> None:
    schema = SCHEMA.replace('separator = ","', 'separator = ",", null = ["NA"]')
    lines = "".join(f'{n % 2},"{text}",{n},s{n % 3}\n' for n, text in enumerate(texts))
    prepare_text(tmp_path, schema, f"click,item emb,price,shop\n{lines}")
    np.testing.assert_array_equal(of_files(tmp_path / "out"), EXPECTED)
    spaced = [text.replace(",", "  ") for text in texts]
    lines = "".join(f"{n % 2},{text},{n},s{n % 3}\n" for n, text in enumerate(spaced))
    schema = schema.replace('separator = ","', 'separator = " "')
    prepare_text(tmp_path, schema, f"click,item emb,price,shop\n{lines}", output="spaced")
    np.testing.assert_array_equal(of_files(tmp_path / "spaced"), EXPECTED)


def test_streams_and_requests_have_the_numbers_of_files(tmp_path: Path) -> None:
    """Also where single values are encoded without columns, and where a column is missing or text."""
    timed = SCHEMA.replace("label", 'time = "at"\nlabel', 1)
    samples = [row | {"at": 1_700_000_000 + n} for n, row in enumerate(rows(VECTORS))]
    columns: dict[str, Any] = {name: [sample[name] for sample in samples] for name in samples[0]}
    data = prepared(tmp_path, columns | {"item emb": pa.array(VECTORS, pa.list_(pa.float32()))}, timed)
    codec = SampleCodec.load(data)
    of_json = codec.encode(codec.from_json([json.dumps(sample).encode() for sample in samples]))
    mixed = [samples[0] | {"item emb": "[0.5, -1.25, 3]"}, samples[1] | {"item emb": []}, *samples[2:]]
    others = [codec.encode(codec.from_objects(mixed)), codec.encode(codec.from_table(pa.table(columns)))]
    block, bad = codec.encode_request(mixed)
    for found in (of_json.block, *(other.block for other in others), block):
        np.testing.assert_array_equal(found.dense[:, :WIDTH], EXPECTED)
        np.testing.assert_array_equal(found.dense, of_json.block.dense)
    assert not bad
    wrong = [[1.0, 2.0], [1.0, 2.0, float("inf")], [1.0, None, 2.0], ["a", 1, 2], 5, True, "1,2", {"a": 1}]
    for value in wrong:
        block, (reason,) = codec.encode_request([samples[0], samples[1] | {"item emb": value}])
        assert (len(block), reason.index) == (1, 1)
        assert "column item emb: must be a list of" in reason.reason


def test_vectors_of_another_width_or_without_a_number_are_bad_rows(tmp_path: Path) -> None:
    for vector in ([1.0, 2.0], [1.0, 2.0, 3.0, 4.0], [1.0, None, 3.0], [1.0, float("nan"), 3.0]):
        columns = as_columns(pa.array([*VECTORS, vector], pa.list_(pa.float64())))
        message = r"row 5, column item emb: must be a list of 3 finite numbers or null, got \[1\.0.*on_bad_row"
        refused(message, prepared, tmp_path / "bad", columns)
    np.testing.assert_array_equal(of_files(prepared(tmp_path, columns, on_bad_row="skip")), EXPECTED)
    columns = as_columns(pa.array([["a"] * 3] * 4))
    refused("must be a list of 3 finite numbers", prepared, tmp_path / "words", columns)
    refused("has the type int64; it must hold lists", prepared, tmp_path / "one", columns | {"item emb": [1, 2, 3, 4]})
    text = columns | {"item emb": ["1,2,3"] * 4}
    refused("its vectors need a separator", prepared, tmp_path / "t", text, SCHEMA.replace(', separator = ","', ""))


def test_each_number_is_scaled_by_itself_if_asked(tmp_path: Path) -> None:
    """A missing vector is zeros before."""
    columns = as_columns(pa.array(VECTORS, pa.list_(pa.float64())))
    data = prepared(tmp_path, columns, SCHEMA.replace("width = 3", 'width = 3, transform = "minmax"'))
    low, high = EXPECTED.min(axis=0), EXPECTED.max(axis=0)
    np.testing.assert_allclose(of_files(data), (EXPECTED - low) / (high - low), atol=1e-7)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "width must be at least 1 for the kind vector"),
        ({"width": -1}, "width must be at least 1"),
        ({"width": 2, "transform": "quantile"}, "transform must be one of none, minmax, got 'quantile'"),
        (
            {"width": 2, "min_count": 2},
            "min_count is for the kinds categorical, multi, sequence, weighted, not for vector",
        ),
        ({"width": 2, "pooling": "sum"}, "pooling is for the kinds multi, weighted, not for vector"),
    ],
)
def test_keys_that_vectors_do_not_have_are_refused(keys: dict[str, Any], message: str) -> None:
    refused(message, RawField, "emb", "vector", **keys)
    refused("width is for the kinds vector, not for numeric", RawField, "price", "numeric", width=2)


def test_vectors_are_inferred(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    rows_of = draw.random((200, 4)).round(3)
    columns: dict[str, Any] = {"click": [n % 2 for n in range(200)], "shop_id": [n % 7 for n in range(200)]}
    columns["fixed"] = pa.array(list(rows_of), pa.list_(pa.float32(), 4))
    columns["lists"] = [None if n % 9 == 0 else value for n, value in enumerate(rows_of.tolist())]
    columns["ids"] = pa.array([[float(n % 5), float(n % 3)] for n in range(200)], pa.list_(pa.float64()))
    columns["ragged"] = [value[: 2 + n % 2] for n, value in enumerate(rows_of.tolist())]
    columns["joined"] = [" ".join(map(str, value)) for value in rows_of.tolist()]
    columns["json"] = [json.dumps(value) for value in rows_of.tolist()]
    pq.write_table(pa.table(columns), tmp_path / "raw.parquet")
    found = infer_schema(tmp_path / "raw.parquet")
    kinds = {field.keys["name"]: (field.keys["kind"], field.keys.get("width")) for field in found.fields}
    vectors = dict.fromkeys(("fixed", "lists", "joined", "json"), ("vector", 4))
    assert kinds == {"shop_id": ("categorical", None), "ids": ("multi", None), **vectors}
    assert "# left out: 'ragged': lists of different numbers of floats, which are not read" in found.text
    (tmp_path / "columns.toml").write_text(found.text)
    schema = prepare("tabular", [tmp_path / "raw.parquet"], tmp_path / "out", schema_file=tmp_path / "columns.toml")
    assert len(schema.dense) == 16
    lines = [json.dumps({"click": n % 2, "shop_id": n % 7, "emb": value}) for n, value in enumerate(rows_of.tolist())]
    (tmp_path / "raw.jsonl").write_text("\n".join(lines))
    of_json = {field.keys["name"]: field.keys["kind"] for field in infer_schema(tmp_path / "raw.jsonl").fields}
    assert of_json == {"shop_id": "categorical", "emb": "vector"}
