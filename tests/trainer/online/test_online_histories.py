"""Online training on histories: published versions are those of an export, and two processes train what one does."""

from pathlib import Path

import pytest

from cowrec.data_pipeline.synthetic.histories import HistoryConfig, history_tables
from history_cases import make_histories, with_categories
from online_cases import CONFIG, assert_readers_equal_an_export, online_case, write_stream
from run_comparison import assert_close, state_of
from trainer_cases import outcomes_in_processes

HISTORIES = HistoryConfig(rows=400, items=300, groups=4, max_length=4, half_life=1.0)
SETTINGS = ["online.publish_seconds=0.05", "online.dense_seconds=0.1", "optimizer.absent_rows=lazy", "model.name=din"]
SETTINGS += ["id_table.expire_after=''", "id_table.capacity=100"]
"""Fewer rows than items, so that ids are evicted."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("online_histories")
    make_histories(folder, HISTORIES, raw_ids=True)
    (folder / "run.toml").write_text(CONFIG.replace("embedding_dims = { C1 = 9, C3 = 9 }", ""))
    write_stream(
        folder / "incoming", [with_categories(each) for each in history_tables(HISTORIES, 0, 1003, chunk_rows=200)]
    )
    return folder


def test_readers_of_publications_equal_an_export_and_processes_agree(folder: Path) -> None:
    def case(name: str) -> dict[str, object]:
        paths = {"source": str(folder / "incoming"), "run_dir": str(folder / name)}
        return {**paths, "folder": str(folder), "publish": str(folder / f"published_{name}"), "set": SETTINGS}

    assert online_case(case("one")) == "ok"
    served = assert_readers_equal_an_export(folder, folder / "one", folder / "published_one")
    assert served.version > 1
    assert served.counters()["removed_rows"] > 0
    assert outcomes_in_processes(online_case, [case("two")], 2) == [["ok"]] * 2
    assert_close(state_of(folder / "two"), state_of(folder / "one"), atol=1e-5)
    assert_readers_equal_an_export(folder, folder / "two", folder / "published_two")
