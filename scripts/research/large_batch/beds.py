"""Writes synthetic data sets of few, frequent ids, for the study of the defaults: 17 fields, 29,000 ids, 10 % positive.

    python scripts/research/large_batch/beds.py --kind days --rows 4M --output DATA/days_4m

What the kinds differ in: `pairs` have strong effects of pairs of ids (deviation 0.04 for each of 136 pairs, effects of
ids 0.12), `ids` hardly any (0.012), and both drift (by 0.6 and 1 radian from the first to the last sample). In `days`,
the samples are of 365 days in order, of which three fields name day of week, month and day of month, and each day has
effects of its own, on all samples and on ids of three fields, that end with it: what is learnt by heart of them is of
no use later. The test samples are the newest.
"""

import argparse
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from cowrec.data_pipeline import RESERVED_ROWS, DenseField, Schema, SparseField
from cowrec.data_pipeline.dataset.schema import LABEL, library_versions
from cowrec.data_pipeline.synthetic.planted import Draw, intercept_for, probability, write_splits
from cowrec.names import parse_count

SIZES = (7, 12, 31, 24, 60, 100, 300, 300, 350, 350, 700, 1500, 2500, 4000, 5000, 6000, 7766)
RANK, SKEW, CTR, ID_EFFECT, NUMBER_EFFECT, DAYS, DAY_EFFECT = 4, 0.9, 0.1, 0.12, 0.15, 365, 0.35
PAIR_EFFECT = {"pairs": 0.04, "ids": 0.012, "days": 0.012}
DRIFT = {"pairs": 0.6, "ids": 1.0, "days": 0.0}
NUMBERS, DAILY = 2, (6, 7, 10)
"""Numeric fields; fields of which an id has effects that last a day."""


class Bed:
    """The planted model of a kind: effects of ids [2, ids, 1 + RANK], from one to the other, and of days."""

    def __init__(self, kind: str, total: int, seed: int) -> None:
        draw = np.random.default_rng(seed).standard_normal
        scale = np.array([ID_EFFECT] + [(PAIR_EFFECT[kind] / RANK**0.5) ** 0.5] * RANK)
        self.kind, self.total, self.seed, self.intercept = kind, total, seed, 0.0
        self.effects = [draw((2, size, 1 + RANK)) * scale for size in SIZES]
        self.slopes = draw(NUMBERS) * NUMBER_EFFECT
        self.daily = {field: draw((SIZES[field], DAYS)) * DAY_EFFECT for field in DAILY}
        self.days = draw(DAYS) * DAY_EFFECT * 0.7
        self.shares = [np.cumsum(np.arange(1.0, size + 1) ** -SKEW) for size in SIZES]
        parts = [self.draw(total * part // 16, min(4096, total // 16), 9).logits for part in range(16)]
        self.intercept = intercept_for(np.concatenate(parts), CTR)

    def draw(self, first: int, rows: int, stream: int = 1) -> Draw:
        """Samples in the order of time, from ``first``."""
        random = np.random.default_rng((self.seed, stream, first))
        when = (first + np.arange(rows)) / self.total
        day = (when * DAYS).astype(int)
        calendar = (day % 7, np.minimum(day / 30.5, 11).astype(int), (day % 30.5).astype(int))
        ids = np.empty((len(SIZES), rows), np.int64)
        logits = self.days[day] if self.kind == "days" else np.zeros(rows)
        sums, squares = np.zeros((rows, RANK)), np.zeros(rows)
        for field, shares in enumerate(self.shares):
            ids[field] = np.searchsorted(shares, random.random(rows) * shares[-1])
            if self.kind == "days" and field < len(calendar):
                ids[field] = calendar[field]
            now, later = self.effects[field][:, ids[field]]
            angle = when[:, None] * DRIFT[self.kind]
            effect = now * np.cos(angle) + later * np.sin(angle)
            logits = logits + effect[:, 0]
            sums += effect[:, 1:]
            squares += (effect[:, 1:] ** 2).sum(1)
            if self.kind == "days" and field in DAILY:
                logits += self.daily[field][ids[field], day]
        numbers = random.standard_normal((NUMBERS, rows)).astype(np.float32)
        logits += 0.5 * ((sums**2).sum(1) - squares) + self.slopes @ numbers + self.intercept
        return Draw(ids, numbers, logits, (random.random(rows) < probability(logits)).astype(np.float32))


def drawn(bed: Bed, offset: int, first: int, rows: int) -> tuple[pa.Table, Draw]:
    """Samples of a split, and their table."""
    draw = bed.draw(offset + first, rows)
    columns = {LABEL: draw.labels}
    columns |= {f"I{field + 1}": values for field, values in enumerate(draw.dense)}
    columns |= {f"C{field + 1}": (ids + RESERVED_ROWS).astype(np.int32) for field, ids in enumerate(draw.ids)}
    return pa.table(columns), draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=PAIR_EFFECT, required=True)
    parser.add_argument(
        "--rows", required=True, help="training samples; a tenth of them, at least 100K, are for the test"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", "-o", type=Path, required=True, help="folder to write")
    given = parser.parse_args()
    rows = parse_count(given.rows, "--rows")
    tested = max(rows // 10, 100_000)
    bed = Bed(given.kind, rows + tested, given.seed)
    schema = Schema(
        name=f"synthetic {given.kind}",
        dense=tuple(DenseField(f"I{field + 1}") for field in range(NUMBERS)),
        sparse=tuple(
            SparseField(f"C{field + 1}", n + RESERVED_ROWS, encoding="synthetic") for field, n in enumerate(SIZES)
        ),
        splits={},
        settings={"kind": given.kind, "rows": rows, "seed": given.seed},
        versions=library_versions(),
        true_logits=True,
    )
    splits = {"train": (rows, partial(drawn, bed, 0)), "test": (tested, partial(drawn, bed, rows))}
    made = write_splits(given.output, schema, splits, 1 << 18, overwrite=False, progress=None)
    print(f"{given.output}: best possible on the test samples {made.best}")


if __name__ == "__main__":
    main()
