"""Fits the frequencies of Criteo's ids to a sample of rows; writes data_pipeline/synthetic/criteo_frequencies.py.

    python scripts/research/fit_criteo_ids.py SAMPLE     # the first rows of train.txt or dac_sample, plain or compressed

Each id in more than 1 of 2^5 rows is a class of its own. Ids in more than 1 of 2^11 rows are grouped by count, one
class per halving. The remaining lookups of a field are distributed over classes of frequency 2^-(k + 1/2),
k = 11, 12, ..., so that

* n draws contain as many ids once, twice, 3-4, 5-8, 9-16 and 17-27 times as the sample of n rows;
* 45,840,617 draws contain as many distinct ids as the same number of rows of Criteo's training set (CRITEO_SIZES);
* neighbouring classes differ smoothly, which determines what the sample does not.

Fields are fitted separately: co-occurrence of ids in a row is not modelled.
"""

import argparse
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cowrec.data_pipeline import PrepareConfig, prepare
from cowrec.data_pipeline.encoding.vocabulary import Vocabulary
from cowrec.data_pipeline.synthetic.criteo_frequencies import CRITEO_SIZES

OUTPUT = Path(__file__).parents[2] / "data_pipeline" / "synthetic" / "criteo_frequencies.py"
CRITEO_ROWS = 45_840_617
SINGLE_CLASSES, KNOWN_CLASSES, CLASSES = 5, 11, 27
COUNT_EDGES = (1, 2, 3, 5, 9, 17, 28)
COUNT_ERROR, SIZE_ERROR = 0.01, 0.002
"""Relative errors with the weight of one standard deviation, in addition to the error of the sample."""
SMOOTHNESS = 3.0

HEADER = '''"""Frequencies of the ids in Criteo's 26 fields, fitted to real rows by scripts/research/fit_criteo_ids.py.

A field is a list of classes (number of ids, share of the field's lookups) by decreasing frequency; the ids of a class
are equally frequent. 80,000 draws repeat ids as often as 80,000 real rows do; 45.8 million draws see as many distinct
ids as Criteo's vocabularies hold.
"""

CRITEO_FREQUENCIES: tuple[tuple[tuple[int, float], ...], ...] = (
'''

Classes = list[tuple[int, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sample", type=Path, help="rows in the layout of Kaggle's train.txt")
    arguments = parser.parse_args()
    text = HEADER
    for field, (counts, size) in enumerate(zip(id_counts(arguments.sample), CRITEO_SIZES, strict=True), 1):
        pairs = ", ".join(f"({ids},_{share:.3g})" for ids, share in fit_classes(counts, size) if ids)
        # Underscores keep a pair on one line.
        lines = textwrap.fill(f"({pairs}),", 112, break_on_hyphens=False).replace("_", " ")
        text += f"    # C{field}\n{textwrap.indent(lines, '    ')}\n"
    OUTPUT.write_text(f"{text})  # fmt: skip\n", encoding="utf-8")
    print(OUTPUT)


def id_counts(sample: Path) -> list[np.ndarray]:
    """Counts each id of each field, including the missing value: decreasing int64 [ids] per field."""
    with tempfile.TemporaryDirectory() as folder:
        schema = prepare("criteo", [sample], Path(folder) / "data", PrepareConfig(test_fraction=0.0))
        files = [Path(folder) / "data" / "vocabulary" / f"{field.name}.parquet" for field in schema.sparse]
        present = [Vocabulary.load(file).counts for file in files]
    missing = [schema.splits["train"].rows - counts.sum() for counts in present]
    return [np.sort(np.append(counts, none))[::-1] for counts, none in zip(present, missing, strict=True)]


def fit_classes(counts: np.ndarray, size: int) -> Classes:
    """Fits the classes of a field: number of ids, and their total share of lookups.

    Args:
        counts: occurrences of each id in the sample, int [ids].
        size: distinct ids in CRITEO_ROWS rows.
    """
    rows = counts.sum()
    counts = counts[counts > 0]
    halvings = np.floor(-np.log2(counts / rows))
    known = [(1, float(count / rows)) for count in counts[halvings < SINGLE_CLASSES]]
    for k in range(SINGLE_CLASSES, KNOWN_CLASSES):
        known.append((int((halvings == k).sum()), float(counts[halvings == k].sum() / rows)))
    remaining = 1 - sum(share for _, share in known)
    if remaining <= 0:
        return known
    rates = 2.0 ** -(torch.arange(KNOWN_CLASSES, CLASSES, dtype=torch.float64) + 0.5)
    seen = torch.tensor(np.histogram(counts, COUNT_EDGES)[0])
    expected_per_share = count_probabilities(rates * rows) / rates
    distinct_per_share = -torch.expm1(-rates * CRITEO_ROWS) / rates
    known_ids = sum(ids for ids, _ in known)

    def misfit(logits: Tensor) -> Tensor:
        shares = remaining * logits.softmax(0)
        by_count = (expected_per_share @ shares - seen).square() / (seen + 1 + (COUNT_ERROR * seen).square())
        size_error = (known_ids + distinct_per_share @ shares) / size - 1
        return by_count.sum() + (size_error / SIZE_ERROR).square() + SMOOTHNESS * logits.diff(n=2).square().sum()

    ids = (remaining * minimum(misfit, len(rates)).softmax(0) / rates).round()
    return known + list(zip(ids.int().tolist(), (ids * rates).tolist(), strict=True))


def count_probabilities(means: Tensor) -> Tensor:
    """Probability that an id of each mean count is counted in each bin of COUNT_EDGES: [bins, classes]."""
    times = torch.arange(1, COUNT_EDGES[-1], dtype=torch.float64)[:, None]
    poisson = (times * means.log() - means - torch.lgamma(times + 1)).exp()
    return torch.stack([part.sum(0) for part in poisson.split(np.diff(COUNT_EDGES).tolist())])


def minimum(function: Callable[[Tensor], Tensor], size: int) -> Tensor:
    """Minimizes a convex function of a point [size]."""
    point = torch.zeros(size, dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([point], max_iter=3000, line_search_fn="strong_wolfe", tolerance_change=1e-13)

    def value() -> Tensor:
        search.zero_grad()
        found = function(point)
        found.backward()
        return found

    search.step(value)
    return point.detach()


if __name__ == "__main__":
    main()
