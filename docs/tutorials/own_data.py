"""Your own data: from a log of clicks to predictions.

Run this script with `python docs/tutorials/own_data.py [FOLDER]`. It takes some seconds. FOLDER keeps its files.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cowrec.data_pipeline import PrepareConfig, prepare
from cowrec.trainer import evaluate, load_config, predict, train

# %% The script writes a log. Your own log may be Parquet, Arrow, JSON lines or delimited text, in any number of files.


def write_log(path: Path, samples: int, seed: int) -> None:
    """Writes a log of users who like some topics; a click is more likely if the topics of user and item match."""
    draw = np.random.default_rng(seed)
    user, item = draw.integers(0, 200, samples), draw.zipf(1.5, samples) % 300
    price = draw.lognormal(2, 1, samples)
    logit = -2 + 2.5 * (user % 5 == item % 5) - 0.3 * np.log(price)
    columns = {
        "clicked": (draw.random(samples) < 1 / (1 + np.exp(-logit))).astype(int),
        "user": [f"user{each}" for each in user],
        "item": item,
        "price": price,
        "topics": [[f"topic{each % 5}", f"brand{each % 7}"] for each in item],
    }
    pq.write_table(pa.table(columns), path)


# %% A schema file names the columns and their kinds.

SCHEMA = """
label = "clicked"

fields = [
    {name = "user", kind = "categorical"},
    {name = "item", kind = "categorical"},
    {name = "price", kind = "numeric"},
    {name = "topics", kind = "multi", separator = "|"},  # in text; Parquet has lists
]
"""

# %% A run file has the settings that differ from the defaults. docs/reference.md lists all settings.

RUN = """
[train]
batch_size = 256
epochs = 3

[model]
hidden = [32, 32]

[optimizer]
base_batch_size = 256
embedding_lr = 3e-3
dense_lr = 3e-3
"""


def main(folder: Path) -> None:
    (folder / "columns.toml").write_text(SCHEMA)
    (folder / "run.toml").write_text(RUN)
    write_log(folder / "monday.parquet", 6000, seed=1)
    write_log(folder / "tuesday.parquet", 1000, seed=2)

    # %% Prepare once: ids get rows, numbers get scales, and a tenth of the samples becomes the test split. Command:
    # cowrec prepare tabular --schema columns.toml --input monday.parquet --output monday
    schema = prepare(
        "tabular", [folder / "monday.parquet"], folder / "monday", PrepareConfig(), schema_file=folder / "columns.toml"
    )
    print(f"{schema.split('train').rows:,} training samples, fields {[field.name for field in schema.sparse]}")

    # %% Train: cowrec train run.toml --data monday --run-dir run
    report = train(load_config(folder / "run.toml"), folder / "monday", folder / "run")
    print(f"AUC {report['auc']:.3f}, calibration {report['calibration']:.2f}")

    # %% Measure by segment: cowrec evaluate run --data monday --by topics
    measured = evaluate(folder / "run", folder / "monday", by=["topics"], top=3)
    print(f"GAUC by topics {measured['by']['topics']['gauc']:.3f}")
    for segment in measured["by"]["topics"]["largest"]:
        print(f"  {segment['id']}: {segment['rows']} samples, click rate {segment['ctr']:.2f}")

    # %% Predict the next day, which is prepared with the ids and scales of the run:
    # cowrec prepare tabular --like run --input tuesday.parquet --output tuesday
    # cowrec predict run --data tuesday --output predictions.parquet
    prepare("tabular", [folder / "tuesday.parquet"], folder / "tuesday", like=folder / "run")
    predict(folder / "run", folder / "tuesday", folder / "predictions.parquet")
    predictions = pq.read_table(folder / "predictions.parquet")["prediction"].to_numpy()
    clicked = pq.read_table(folder / "tuesday.parquet")["clicked"].to_numpy()
    print(f"Tuesday: mean prediction {predictions.mean():.3f}, click rate {clicked.mean():.3f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
