"""Writes MovieLens-1M with histories, for the study of large batches: the last movies that a user liked before each.

    python scripts/research/large_batch/movielens_histories.py --input ml1m_labelled.csv.xz --users 0.25 \
        --output DATA/ml_histories

The file has no times. Each user's ratings are put into an order drawn by the seed, which stands in for that of time; a
movie is liked if its label is 1. Samples are stored by their place in it, as a share of the user's ratings, so that
the last tenth of each user's is for the test and the last ones in training for validation: no history has the label of
a later sample.
"""

import argparse
import lzma
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq

from cowrec.data_pipeline import PrepareConfig, prepare

FIELDS = ("user", "movie", "gender", "age", "occupation")
SCHEMA = 'label = "label_ge4"\n' + "\n".join(f'[[fields]]\nname = "{name}"\nkind = "categorical"' for name in FIELDS)
SCHEMA += '\n[[fields]]\nname = "history"\nkind = "sequence"\nmax_length = {length}\nshares = "movie"\n'


def with_histories(ratings: pa.Table, length: int, seed: int) -> pa.Table:
    """Adds the last movies that the user liked before each rating, the newest last, and orders samples as above."""
    random, users = np.random.default_rng(seed), ratings["user"].to_numpy()
    ratings = ratings.take(np.lexsort((random.random(len(users)), users)))  # user by user
    users, liked = ratings["user"].to_numpy(), ratings["label_ge4"].to_numpy() == 1
    _, first, inverse, counts = np.unique(users, return_index=True, return_inverse=True, return_counts=True)
    before = np.cumsum(liked) - liked  # liked ratings of all users before each one
    starts = np.maximum(before[first][inverse], before - length)
    lengths = before - starts
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
    movies = ratings["movie"].combine_chunks().filter(pa.array(liked))
    histories = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), movies.take(pa.array(places)))
    share = (np.arange(len(users)) - first[inverse] + random.random(len(users))) / counts[inverse]
    return ratings.append_column("history", histories).take(np.argsort(share))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", type=Path, required=True, help="the CSV file, or .xz of it")
    parser.add_argument("--output", "-o", type=Path, required=True, help="folder to write")
    parser.add_argument("--users", type=float, default=1.0, help="share of the users, drawn by the seed [%(default)s]")
    parser.add_argument("--length", type=int, default=20, help="longest history [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="of each user's order [%(default)s]")
    given = parser.parse_args()
    with (lzma.open if given.input.suffix == ".xz" else open)(given.input, "rb") as file:
        ratings = csv.read_csv(file)
    chosen = np.random.default_rng((given.seed, 1)).random(1 + ratings["user"].to_numpy().max()) < given.users
    ratings = ratings.filter(pa.array(chosen[ratings["user"].to_numpy()]))
    table = with_histories(ratings, given.length, given.seed)
    with TemporaryDirectory() as folder:
        pq.write_table(table, Path(folder) / "samples.parquet")
        (Path(folder) / "schema.toml").write_text(SCHEMA.format(length=given.length))
        config = PrepareConfig(split="order", test_fraction=0.1)
        prepare("tabular", [f"{folder}/samples.parquet"], given.output, config, schema_file=f"{folder}/schema.toml")
    lengths = pc.list_value_length(table["history"]).to_numpy()
    print(f"{given.output}: {table.num_rows:,} samples, histories of {lengths.mean():.1f} movies in the mean")


if __name__ == "__main__":
    main()
