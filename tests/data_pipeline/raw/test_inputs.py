"""Inputs: files, patterns, folders and the columns that Hive's folders give."""

import os

import pytest

from cowrec.data_pipeline.raw.inputs import find_inputs


@pytest.fixture
def folder(tmp_path, monkeypatch):
    hours = [f"more/date=2024-01-02/hour={hour}.csv" for hour in ("3/b", "__HIVE_DEFAULT_PARTITION__/a")]
    names = ["day_1.csv", "day_10.csv", "day_2.csv", "_SUCCESS", ".day.crc", "_old/a.csv", "city=K%C3%B6ln/b.csv"]
    names += [*hours, "x[1].csv"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def paths(*inputs):
    return [os.path.relpath(file) for file in find_inputs([os.fspath(path) for path in inputs])]


def test_files_keep_their_order_and_others_are_sorted(folder):
    assert paths("day_2.csv", "day_1.csv") == ["day_2.csv", "day_1.csv"]
    assert paths("day_*.csv") == ["day_1.csv", "day_10.csv", "day_2.csv"]
    assert paths("x[1].csv") == ["x[1].csv"]
    deep = "more/date=2024-01-02"
    nested = [f"{deep}/hour=3/b.csv", f"{deep}/hour=__HIVE_DEFAULT_PARTITION__/a.csv"]
    assert paths("more") == paths("more/*") == paths("more/**/*.csv") == nested
    assert paths(folder) == ["city=K%C3%B6ln/b.csv", "day_1.csv", "day_10.csv", "day_2.csv", *nested, "x[1].csv"]
    assert paths("*.c[rs]*") == paths("./*.c*v") == ["day_1.csv", "day_10.csv", "day_2.csv", "x[1].csv"]
    (folder / "more" / "nothing yet").mkdir()
    assert paths("*") == paths("**") == paths("**/*") == paths(folder)
    assert paths("more/**") == nested
    assert paths("_S*", "_*/*.csv", ".*rc") == ["_SUCCESS", "_old/a.csv", ".day.crc"]
    assert paths("day_2.csv", "more") == ["day_2.csv", *nested]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["th\udce9.csv"], r"the path 'th\\udce9.csv' is not UTF-8, as .*; rename it"),
        (["latin"], r"the path 'latin/\\udce9.csv' is not UTF-8"),
        (["nowhere.csv"], "input file nowhere.csv does not exist"),
        (["_S*", "*SUCCESS"], r"input \*SUCCESS: no file or folder matches this pattern \(names with . or _ first"),
        (["none"], "input folder none has no file"),
        (["empty.csv"], "input file empty.csv is empty"),
    ],
)
def test_inputs_are_checked(folder, inputs, message):
    for name in ("none", "latin"):
        (folder / name).mkdir()
    (folder / "latin" / "\udce9.csv").touch()
    (folder / "none" / "_SUCCESS").touch()
    (folder / "empty.csv").touch()
    with pytest.raises(ValueError, match=message):
        find_inputs(inputs)


@pytest.mark.parametrize(
    ("mark", "table"),
    [("_delta_log/0.json", "Delta Lake"), (".hoodie/t", "Hudi"), ("metadata/v1.metadata.json", "Iceberg")],
)
def test_the_folder_of_a_lakes_table_is_refused(tmp_path, mark, table):
    """In it or above it, by name or pattern; its files may be named one by one."""
    files = [tmp_path / "table" / "day=1" / "a.parquet", tmp_path / "table" / mark]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    for text in (tmp_path, tmp_path / "table", tmp_path / "table/day=1", tmp_path / "table/day=1/*.parquet"):
        with pytest.raises(ValueError, match=f"is a {table} table .* name the files of its present version"):
            find_inputs([os.fspath(text)])
    assert find_inputs([os.fspath(files[0])]) == [os.fspath(files[0])]
