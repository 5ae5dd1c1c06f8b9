"""Files that someone or something has changed: a clear error, never another one, and never rows that were not meant."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cowrec.data_pipeline import Reader, Schema
from cowrec.trainer.config.run import RunConfig, load_config, to_plain
from trainer_cases import make_data

OFTEN = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SELDOM = settings(OFTEN, max_examples=100)
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=20)
LEAVES = st.one_of(st.booleans(), st.integers(-(2**70), 2**70), st.floats(), TEXT)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=8
)


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """The paths to all parts of nested dictionaries and lists."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inner for place in places(each, (*path, key)))]


def changed(value: Any, path: tuple, new: Any) -> Any:
    """A copy with another value at a path."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(copy[path[0]], path[1:], new)
    return copy


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("fuzz"))


def loaded(file: Path) -> RunConfig | None:
    """A configuration, or None where it was refused in the words that a user is to see."""
    try:
        return load_config(file)
    except ValueError as error:
        if type(error) is not ValueError or not str(error).startswith(str(file)):
            raise AssertionError("not a message") from error
        return None


@OFTEN
@given(choice=st.integers(0), value=VALUES)
def test_any_value_at_any_place_of_a_configuration(tmp_path: Path, choice: int, value: Any) -> None:
    """It loads to what is written, or one ValueError says what is wrong."""
    plain = to_plain(RunConfig())
    file = tmp_path / "run.toml"
    paths = [place for place in places(plain) if len(place) > 1]
    path = paths[choice % len(paths)]
    try:
        file.write_text(tomli_w.dumps(changed(plain, path, value)), encoding="utf-8")
    except (TypeError, ValueError, UnicodeEncodeError):
        return  # TOML has no such value
    config = loaded(file)
    if config is None:
        return
    found: Any = to_plain(config)
    for key in path:
        found = found[key]
    assert found == value or found == pytest.approx(value, nan_ok=True)


@OFTEN
@given(text=TEXT, start=st.integers(0), length=st.integers(0, 30))
def test_any_text_in_a_configuration(tmp_path: Path, text: str, start: int, length: int) -> None:
    whole = tomli_w.dumps(to_plain(RunConfig()))
    start %= len(whole)
    file = tmp_path / "run.toml"
    file.write_text(whole[:start] + text + whole[start + length :], encoding="utf-8")
    loaded(file)


def read_all(folder: Path) -> int | str:
    """Rows of the training set, or the message that it was refused with."""
    try:
        return _read_all(folder)
    except ValueError as error:
        return str(error)


def _read_all(folder: Path) -> int:
    schema = Schema.load(folder)
    rows = 0
    for batch in Reader(folder, "train", batch_size=51).epoch(0):
        rows += len(batch.label)
        for field, ids in batch.sparse.to_dict().items():
            size = next(each.num_embeddings for each in schema.sparse if each.name == field)
            values = ids.values()
            assert not len(values) or 0 <= int(values.min()) <= int(values.max()) < size
    return rows


@SELDOM
@given(choice=st.integers(0), value=VALUES | st.none())
def test_any_value_at_any_place_of_a_schema(data: Path, tmp_path: Path, choice: int, value: Any) -> None:
    """The data are read as they are, or refused: no table is looked up beyond its end."""
    folder = tmp_path / "data"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(data, folder)
    whole = json.loads((data / "schema.json").read_text())
    path = places(whole)[choice % len(places(whole))]
    (folder / "schema.json").write_text(json.dumps(changed(whole, path, value)), encoding="utf-8")
    outcome = read_all(folder)
    assert outcome in (0, 205) or (isinstance(outcome, str) and outcome)  # a split without rows has none to serve


COLUMNS = st.sampled_from(["label", "price", "city", "tags", "history"])
ARRAYS = st.sampled_from(
    [
        pa.array([2**31 - 1] * 205, pa.int64()),
        pa.array([-1] * 205, pa.int32()),
        pa.array([10**6] * 205, pa.int32()),
        pa.array(["7"] * 205),
        pa.array([None] * 205, pa.int32()),
        pa.array([True] * 205),
        pa.array([b"x"] * 205),
        pa.array([[1, -5]] * 205, pa.list_(pa.int32())),
        pa.array([[10**6]] * 205, pa.list_(pa.int32())),
        pa.array([[[1]]] * 205),
        pa.array([[None]] * 205, pa.list_(pa.int32())),
        pa.array([None] * 205, pa.list_(pa.int32())),
        pa.array([1.5] * 205, pa.float64()),
        pa.array(np.full(205, np.inf), pa.float32()),
        pa.array([{"a": 1}] * 205),
    ]
)


@SELDOM
@given(column=COLUMNS, values=ARRAYS, drop=st.booleans(), rows=st.sampled_from([0, 1, 204, 205]))
def test_shards_of_other_types_and_ids(
    data: Path, tmp_path: Path, column: str, values: pa.Array, drop: bool, rows: int
) -> None:
    """Wrong types, nulls, ids outside their table, missing columns and missing rows are refused by name."""
    folder = tmp_path / "data"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(data, folder)
    shard = next((folder / "train").iterdir())
    table = pq.read_table(shard)
    place = table.schema.get_field_index(column)
    table = table.remove_column(place) if drop else table.set_column(place, column, values)
    pq.write_table(table.slice(0, rows), shard)
    outcome = read_all(folder)
    assert outcome == 205 or column in str(outcome) or "rows" in str(outcome)


@SELDOM
@given(place=st.integers(0), byte=st.integers(0, 255), cut=st.booleans())
def test_damaged_shards(data: Path, tmp_path: Path, place: int, byte: int, cut: bool) -> None:
    """Parquet's checksums are not written, so a flipped bit may pass as another value; ids stay within their tables."""
    folder = tmp_path / "data"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(data, folder)
    shard = next((folder / "train").iterdir())
    content = bytearray(shard.read_bytes())
    place %= len(content)
    content[place] = byte
    shard.write_bytes(content[:place] if cut else content)
    outcome = read_all(folder)
    assert outcome == 205 or shard.name in str(outcome)
