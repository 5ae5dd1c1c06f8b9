"""Damaged or edited files: a clear error, never an unrelated one, and never ids outside their table."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cowrec.data_pipeline import Reader, Schema
from cowrec.errors import UserError
from cowrec.trainer.config.run import RunConfig, load_config, save_config, to_plain
from trainer_cases import make_data

SHARED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=20)
LEAVES = st.one_of(st.booleans(), st.integers(-(2**70), 2**70), st.floats(), TEXT)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=8
)


def paths_of(value: Any, path: tuple = ()) -> list[tuple]:
    """Paths to all parts of nested dictionaries and lists."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, value in inner for found in paths_of(value, (*path, key)))]


def changed(value: Any, path: tuple, new: Any) -> Any:
    """Copies a value with another part at a path."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(copy[path[0]], path[1:], new)
    return copy


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("fuzz"))


def loaded(file: Path) -> RunConfig | None:
    """Loads a configuration; None if it was refused with a message for the user."""
    try:
        return load_config(file)
    except ValueError as error:
        if type(error) is not UserError or not str(error).startswith(str(file)):
            raise AssertionError("not a message") from error
        return None


@SHARED
@given(choice=st.integers(0), value=VALUES)
def test_any_value_at_any_key_of_a_configuration(tmp_path: Path, choice: int, value: Any) -> None:
    """The value is loaded as written, and again when it has been saved, or one UserError explains the problem."""
    plain = to_plain(RunConfig())
    file = tmp_path / "run.toml"
    paths = [path for path in paths_of(plain) if len(path) > 1]
    path = paths[choice % len(paths)]
    try:
        file.write_text(tomli_w.dumps(changed(plain, path, value)), encoding="utf-8")
    except (TypeError, ValueError, UnicodeEncodeError):
        return  # TOML has no such value
    config = loaded(file)
    if config is None:
        return
    save_config(config, file, "two\nlines")
    assert load_config(file) == config or "nan" in file.read_text()
    assert file.read_text().startswith("# two\n# lines\n")
    found: Any = to_plain(config)
    for key in path:
        found = found[key]
    if isinstance(value, dict):  # a table of tables, which have defaults
        found, value = sorted(found), sorted(value)
    assert found == value or found == pytest.approx(value, nan_ok=True)


def read_all(folder: Path) -> int | str:
    """Number of samples of the training set, or the message of the error."""
    try:
        sizes = {field.name: field.num_embeddings for field in Schema.load(folder).sparse}
        batches = list(Reader(folder, "train", batch_size=51).epoch(0))
    except ValueError as error:
        return str(error)
    for batch in batches:
        for field, ids in batch.sparse.to_dict().items():
            assert all(0 <= value < sizes[field] for value in ids.values().tolist())
    return sum(len(batch.label) for batch in batches)


@SHARED
@given(choice=st.integers(0), value=VALUES | st.none())
def test_any_value_at_any_key_of_a_schema(data: Path, tmp_path: Path, choice: int, value: Any) -> None:
    """The data are read or refused; no id is beyond the end of its table."""
    folder = shutil.copytree(data, tmp_path / "data", dirs_exist_ok=True)
    schema = json.loads((data / "schema.json").read_text())
    path = paths_of(schema)[choice % len(paths_of(schema))]
    (folder / "schema.json").write_text(json.dumps(changed(schema, path, value)), encoding="utf-8")
    outcome = read_all(folder)
    assert outcome in (0, 205) or (isinstance(outcome, str) and outcome)  # 0: a split without samples


@SHARED
@given(offset=st.integers(0), byte=st.integers(0, 255), truncate=st.booleans())
def test_damaged_shards(data: Path, tmp_path: Path, offset: int, byte: int, truncate: bool) -> None:
    """Shards have no checksums, so a flipped bit may pass as another value; ids stay within their tables."""
    folder = shutil.copytree(data, tmp_path / "data", dirs_exist_ok=True)
    shard = next((folder / "train").iterdir())
    content = bytearray(shard.read_bytes())
    offset %= len(content)
    content[offset] = byte
    shard.write_bytes(content[:offset] if truncate else content)
    outcome = read_all(folder)
    assert outcome == 205 or shard.name in str(outcome)
