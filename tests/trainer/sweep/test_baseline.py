"""`cowrec baseline` against scikit-learn and LightGBM on the raw values, and its lines in `cowrec plot`."""

import json
from pathlib import Path

import lightgbm
import numpy as np
import pytest
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score

from commands.command_line import Cowrec
from cowrec.data_pipeline import PrepareConfig
from cowrec.trainer.sweep.baseline import LIGHTGBM, LOGISTIC_REGRESSION, PENALTIES, baselines
from raw_cases import prepare_text
from refusal import refused

SCHEMA = """
delimiter = ","
label = "click"
fields = [
    {name = "city", kind = "categorical", min_count = 1},
    {name = "tags", kind = "multi", separator = "|", min_count = 1},
]
"""
ROWS, TRAIN, VALIDATION = 3000, 2160, 240
"""The last samples are the test split; the last tenth of the others are validation samples."""


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], list[str], np.ndarray]:
    """A prepared data set in the order of the raw file, and the raw columns."""
    rng = np.random.default_rng(5)
    city = rng.integers(0, 40, ROWS)
    tags = [rng.choice(12, size, replace=False) for size in rng.integers(0, 4, ROWS)]
    effects, of_tags = rng.normal(size=40), rng.normal(size=12)
    logit = effects[city] + [of_tags[tag].sum() for tag in tags] - 1
    label = (rng.random(ROWS) < 1 / (1 + np.exp(-logit))).astype(int)
    cities, texts = [f"c{number}" for number in city], ["|".join(f"t{tag}" for tag in own_tags) for own_tags in tags]
    lines = [f"{y},{c},{t}" for y, c, t in zip(label, cities, texts, strict=True)]
    folder = tmp_path_factory.mktemp("baseline")
    config = PrepareConfig(split="order", test_rows=ROWS - TRAIN - VALIDATION)
    prepare_text(folder, SCHEMA, "click,city,tags\n" + "\n".join(lines) + "\n", config=config)
    return folder / "out", cities, texts, label


def test_both_are_those_of_the_raw_values(cowrec: Cowrec, raw: tuple[Path, list[str], list[str], np.ndarray]) -> None:
    """Logistic regression on one-hot values by scikit-learn; LightGBM by the measures of its own package."""
    data, cities, tags, label = raw
    output = data.parent / "baseline"
    found = {baseline["model"]: baseline for baseline in baselines(data, output, 1 << 20)}
    train, test = slice(0, TRAIN), slice(TRAIN + VALIDATION, None)
    words = [f"{city} {tag.replace('|', ' ') or 'missing'}" for city, tag in zip(cities, tags, strict=True)]
    one_hot = CountVectorizer(token_pattern=r"\S+").fit(words[train]).transform(words)
    regression = found[LOGISTIC_REGRESSION]
    assert regression["C"] in PENALTIES
    model = LogisticRegression(C=regression["C"], max_iter=1000).fit(one_hot[train], label[train])
    predicted = model.predict_proba(one_hot[test])[:, 1]
    assert regression["auc"] == pytest.approx(roc_auc_score(label[test], predicted), abs=2e-4)
    assert regression["logloss"] == pytest.approx(log_loss(label[test], predicted), abs=1e-4)

    trees = found[LIGHTGBM]
    ids = {name: np.unique(column, return_inverse=True)[1] for name, column in (("city", cities),)}
    number = [len(tag.split("|")) if tag else 0 for tag in tags]
    last = np.unique([tag.rpartition("|")[2] for tag in tags], return_inverse=True)[1].astype(float)
    features = np.column_stack([ids["city"], number, np.where(np.array(tags) == "", np.nan, last)])
    booster = lightgbm.LGBMClassifier(n_estimators=trees["trees"], verbosity=-1)
    booster.fit(features[train], label[train], categorical_feature=[0, 2])
    predicted = booster.predict_proba(features[test])[:, 1]
    assert trees["auc"] == pytest.approx(roc_auc_score(label[test], predicted), abs=0.01)  # categories in another order
    assert trees["train_rows"] == TRAIN

    table = cowrec("plot", output, "--output", data.parent / "runs.svg")[1].splitlines()
    assert [line.split("  ")[0] for line in table[1:3]] == [LIGHTGBM, LOGISTIC_REGRESSION]
    assert f"{regression['auc']:.4f}" in table[2]


def test_a_split_without_labels_is_refused(tmp_path: Path) -> None:
    text = "click,city,tags\n" + 10 * "1,a,x\n0,b,y\n"
    prepare_text(tmp_path, SCHEMA, text)
    refused("has no test samples with a label", lambda: list(baselines(tmp_path / "out", tmp_path / "b", 9)))


def test_the_newest_samples_are_taken(raw: tuple[Path, list[str], list[str], np.ndarray], tmp_path: Path) -> None:
    lines = list(baselines(raw[0], tmp_path, 1000))
    assert [line["train_rows"] for line in lines] == [1000, 1000]
    assert [json.loads(line)["model"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        LIGHTGBM,
        LOGISTIC_REGRESSION,
    ]
