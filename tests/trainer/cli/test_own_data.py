"""Data as people have them: `cowrec fit` trains on public sets as they are published, and on a log of JSON lines."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from commands.command_line import Cowrec
from cowrec.data_pipeline import Schema
from cowrec.data_pipeline.raw.schema_file import load_schema_file

ROWS = 1000


def taobao(draw: np.random.Generator) -> list[str]:
    """Taobao's display ads: raw_sample.csv joined with user_profile.csv, one of whose names ends in a space."""
    user, ad = draw.integers(1, 200, ROWS), draw.integers(0, 60, ROWS)
    click = (draw.random(ROWS) < 1 / (1 + np.exp(1 - 2 * np.sin(ad)))).astype(int)
    time = 1_494_000_000 + np.sort(draw.integers(0, 8 * 86_400, ROWS))
    lines = [
        "user,time_stamp,adgroup_id,pid,nonclk,clk,cms_segid,age_level,pvalue_level,new_user_class_level ,brand,price"
    ]
    for row, (of_user, of_ad) in enumerate(zip(user.tolist(), ad.tolist(), strict=True)):
        place = ("430548_1007", "430539_1007")[row % 2]
        profile = f"{of_user % 97},{of_user % 7},{('', 1, 2, 3)[of_user % 4]},{('', 1, 2, 3, 4)[of_user % 5]}"
        brand = "NULL" if of_ad % 5 == 0 else of_ad * 3
        clicked = f"{1 - click[row]},{click[row]}"
        lines.append(f"{of_user},{time[row]},{of_ad * 131},{place},{clicked},{profile},{brand},{10 + of_ad * 1.7:.2f}")
    return lines


def outbrain(draw: np.random.Generator) -> list[str]:
    """Outbrain's clicks joined with its events: of the ads shown together one is clicked; times are relative."""
    lines = ["display_id,ad_id,clicked,uuid,document_id,timestamp,platform,geo_location"]
    display = 0
    while len(lines) <= ROWS:
        display += 1
        ads = draw.choice(80, draw.integers(2, 6), replace=False)
        clicked = int(np.argmax(8 * np.sin(ads) + draw.gumbel(size=len(ads))))
        where = ("US>CA>803", "US", "GB>H9", "CA>ON", "")[draw.integers(0, 5)]
        event = f"{draw.integers(0, 150) * 982_451_653:014x},{draw.integers(1, 90) * 37},{61 + display * 3_600_000}"
        event += f",{('1', '2', '3', chr(92) + 'N')[draw.integers(0, 4)]},{where}"
        lines += [f"{display},{ad * 101},{int(place == clicked)},{event}" for place, ad in enumerate(ads.tolist())]
    return lines


LAYOUTS: dict[str, tuple[Callable[[np.random.Generator], list[str]], str, str, set[str]]] = {
    "taobao": (taobao, "clk", "time_stamp", {"nonclk", "clk", "time_stamp"}),
    "outbrain": (outbrain, "clicked", "", {"clicked"}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_public_layout_is_trained_as_it_is(cowrec: Cowrec, tmp_path: Path, name: str) -> None:
    make, label, time, no_fields = LAYOUTS[name]
    lines = make(np.random.default_rng(0))
    (tmp_path / "raw.csv").write_text("\n".join(lines))
    run = tmp_path / "run"
    settings = ("--set", "train.batch_size=50", "--set", "optimizer.l2=1e-6", "--set", "train.epochs=8")
    code, printed, said = cowrec("fit", tmp_path / "raw.csv", "--run-dir", run, *settings)
    assert code == 0, said
    assert "label is a guess" not in said
    layout = load_schema_file(run / "data.toml")
    assert layout.labels[0].column == label
    assert layout.time_columns == ((time,) if time else ())
    used = {field.column for field in layout.fields}
    assert used == set(lines[0].split(",")) - no_fields
    schema = Schema.load(run / "data")
    assert sum(split.rows for split in schema.splits.values()) == len(lines) - 1
    assert float(printed.split("AUC ")[-1].split()[0]) > 0.6


def test_a_log_of_json_lines_goes_from_counts_to_predictions(cowrec: Cowrec, tmp_path: Path) -> None:
    """Times are in milliseconds, the item has a vector, the label is a rate; what is asked about has no label."""
    draw, lines = np.random.default_rng(0), []
    for row in range(ROWS):
        vector = draw.normal(size=3).round(3).tolist()
        shown = int(draw.integers(3, 9))
        clicks = int(draw.binomial(shown, 1 / (1 + np.exp(-3 * vector[0]))))
        user = {"id": f"u{draw.integers(0, 40)}", "premium": bool(row % 2)}
        of_item = {"item_vector": vector, "tags": ["a", "b", "c"][: row % 4]}
        counts = {"clicks": clicks, "impressions": shown}
        lines.append({"user": user, "ts": 1_700_000_000_123 + row * 60_000, **of_item, **counts})
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    settings = ("--set", "train.batch_size=50", "--set", "optimizer.l2=1e-6", "--set", "train.epochs=8")
    code, _, said = cowrec("fit", tmp_path / "log.jsonl", "--run-dir", tmp_path / "run", *settings)
    assert code == 0, said
    layout = load_schema_file(tmp_path / "run" / "data.toml")
    assert (layout.labels[0].count, layout.labels[0].of, layout.time_columns) == ("clicks", "impressions", ("ts",))
    kinds = {field.column: field.kind for field in layout.fields}
    vector_and_flag = {"user.premium": "categorical", "item_vector": "vector"}
    assert kinds == vector_and_flag | {"user.id": "categorical", "tags": "multi"}
    new = [{key: value for key, value in line.items() if key not in ("clicks", "impressions")} for line in lines[:99]]
    (tmp_path / "new.jsonl").write_text("\n".join(map(json.dumps, new)))
    output = tmp_path / "p.parquet"
    code, _, said = cowrec("predict", tmp_path / "run", "--input", tmp_path / "new.jsonl", "--output", output)
    assert code == 0, said
    found = pq.read_table(output)["prediction"].to_numpy()
    rates = [line["clicks"] / line["impressions"] for line in lines[:99]]
    assert np.corrcoef(found, rates)[0, 1] > 0.5
    code, printed, said = cowrec("evaluate", tmp_path / "run", "--input", tmp_path / "log.jsonl")
    assert (code, json.loads(printed)["rows"]) == (0, ROWS), said
