"""Raw files for the tests of the data pipeline, and plain readers of prepared data sets."""

import collections
import csv
import hashlib
import random
from pathlib import Path

import pyarrow.parquet as pq
from hypothesis import strategies as st

from cowrec.data_pipeline import PrepareConfig, prepare

MIXED_SCHEMA = """
delimiter = ","
label = "click"
fields = [
    {name = "price", kind = "numeric"},
    {name = "city", kind = "categorical"},
    {name = "tags", kind = "multi", separator = "|"},
    {name = "history", column = "past views", kind = "weighted", separator = " ", weight_separator = ":"},
]
"""
RECENT = '{name = "recent", column = "tags", kind = "sequence", separator = "|", max_length = 2},'
"""A further field of a schema, of the values of another."""
NULLS_SCHEMA = 'null = ["NA", "-1"]\n' + MIXED_SCHEMA.replace('":"}', '":", null = ["none"]}')

TIMED_SCHEMA = 'time = "seen at"\n' + MIXED_SCHEMA
TIMED_HEADER = "seen at,past views,click,price,tags,city"


def prepare_text(folder, schema, *texts, output="out", config=None, **options):
    """Prepares files of these texts, raw.csv, raw1.csv and so on, with a schema file; by default all for training."""
    (folder / "schema.toml").write_text(schema)
    paths = [folder / f"raw{number or ''}.csv" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    config = config or PrepareConfig(test_fraction=0.0)
    return prepare("tabular", paths, folder / output, config, schema_file=folder / "schema.toml", **options)


def read_split(folder, split):
    """Reads all samples of a split as a dictionary of lists."""
    columns = collections.defaultdict(list)
    for path in sorted((folder / split).iterdir()):
        for name, values in pq.read_table(path).to_pydict().items():
            columns[name] += values
    return columns


names = st.sampled_from(["NA", "none"]) | st.text("abcé 中'\",-", max_size=4)
names |= st.integers(-(2**70), 2**70).map(str) | st.integers(0, 9).map(str)
tags = st.sampled_from(["NA", "none", "-1"]) | st.text("abé", min_size=1, max_size=3) | st.integers(0, 99).map(str)


@st.composite
def raw_rows(draw):
    """Draws pairs of a text file's row and the equal sample."""
    rows = []
    for number in range(draw(st.integers(2, 30))):
        time, label = draw(st.integers(0, 2**33)), draw(st.integers(0, 1)) if number > 1 else number
        price = draw(st.one_of(st.none(), st.sampled_from(["NA", -1, -1.0]), st.integers(-9, 9), st.floats(-1e6, 1e6)))
        city, labels = draw(names), draw(st.lists(tags, max_size=3))
        history = draw(st.lists(st.tuples(tags, st.floats(-4, 4, width=32)), max_size=3))
        text = {
            "seen at": str(time),
            "past views": " ".join(f"{key}:{weight!r}" for key, weight in history),
            "unused": "u",
            "click": str(label),
            "price": "" if price is None else str(price),
            "tags": "|".join(labels),
            "city": city,
        }
        as_text = draw(st.booleans())
        pairs = [{"id": number_or_text(draw, key), "weight": weight} for key, weight in history]
        sample = {
            "seen at": draw(st.sampled_from([time, float(time), str(time)])),
            "past views": text["past views"] if as_text else draw(st.sampled_from([pairs, pairs or None])),
            "click": draw(st.sampled_from([label, float(label), bool(label), str(bool(label))])),
            "price": draw(st.sampled_from([price, text["price"]])),
            "tags": text["tags"] if as_text else [number_or_text(draw, tag) for tag in labels],
            "city": number_or_text(draw, city) if city else draw(st.sampled_from(["", None])),
            "surplus": draw(st.sampled_from([None, 1, "x", {"deep": [1]}])),
        }
        rows.append((text, sample))
    return rows


def number_or_text(draw, text):
    """Returns the text or, if it is a decimal integer, maybe the integer."""
    is_integer = text.lstrip("-").isdecimal() and str(int(text)) == text
    return int(text) if is_integer and draw(st.booleans()) else text


def write_rows(path, rows, lineterminator="\n"):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator=lineterminator)
        writer.writeheader()
        writer.writerows(rows)


def write_criteo(path, rows, seed=0):
    """Writes a random file in Criteo's layout; returns its lines as lists of strings."""
    draw = random.Random(seed)
    table = []
    for _ in range(rows):
        numbers = [draw.choice(["", str(draw.randint(-2, 50))]) for _ in range(13)]
        ids = [draw.choice(["", f"{int(draw.paretovariate(0.5)) % 1000:08x}"]) for _ in range(26)]
        table.append([draw.choice("01"), *numbers, *ids])
    path.write_text("".join("\t".join(row) + "\n" for row in table))
    return table


def fnv_splitmix(text, mask=2**64 - 1):
    state = 0xCBF29CE484222325
    for byte in text.encode():
        state = ((state ^ byte) * 0x100000001B3) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


def content(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def write_timed(folder):
    """Writes 200 random samples with times; returns them as dictionaries."""
    draw = random.Random(0)
    table = []
    for _ in range(200):
        history = [(f"h{draw.randint(0, 9)}", draw.choice([1.0, 0.5])) for _ in range(draw.randint(0, 2))]
        row = {"time": draw.randint(0, 2 * 10**9), "history": history, "click": draw.choice("01")}
        row["price"] = draw.choice(["", "3", "2.5"])
        row["tags"] = [f"t{draw.randint(0, 20)}" for _ in range(draw.randint(1, 3))]
        row["city"] = draw.choice(["", "Köln", "17", f"c{draw.randint(0, 50)}"])
        table.append(row)
    lines = [
        f"{row['time']},{' '.join(f'{key}:{weight}' for key, weight in row['history'])},{row['click']},{row['price']},"
        f"{'|'.join(row['tags'])},{row['city']}"
        for row in table
    ]
    (folder / "raw.csv").write_text("\n".join([TIMED_HEADER, *lines]), encoding="utf-8")
    (folder / "schema.toml").write_text(TIMED_SCHEMA)
    return table
