"""The large-batch study: tunes each bed's base values, then sweeps batch sizes, scaling rules and clips over them.

    python scripts/research/large_batch/study.py --data data --output runs/large_batch

A bed is a data set with a base batch size; the commands that make the data sets are at the top of the beds' TOML files.
Every part is a call of `cowrec tune` or `cowrec sweep`, printed before it starts, and resumable like these: the same
command continues an interrupted study, and a run that has a result is not repeated.
"""

import argparse
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
COWREC = (sys.executable, "-m", "cowrec.trainer")
PUBLISHED = ("none", "sqrt", "sqrt_star", "linear", "cowclip")


@dataclass(frozen=True)
class Bed:
    """A data set and its base batch size, so small that 128 times as large a batch leaves 200 steps if data allow.

    Attributes:
        base: the base batch size.
        trials: of `cowrec tune`; 0 to leave the values as they are.
        ranges: that it searches.
        scales: multiples of the base batch size that the data allow.
        rules: scaling rules that are compared.
    """

    base: int
    trials: int
    ranges: tuple[str, ...] = ()
    scales: tuple[float, ...] = (1, 8, 32, 128, 256, 512)
    rules: tuple[str, ...] = ("half_life", *PUBLISHED)


# A quarter: 512 times that batch is 128 times the base, with more than 200 steps.
SCALES = (0.25, 1, 128, 512)
CONTRAST = ("half_life", "sqrt_star", "cowclip")
HISTORY_RULES = ("half_life", "cowclip", "none", "linear")
HISTORY_RATES = (("embedding_lr", 7.5e-4), ("dense_lr", 5e-4))
BEDS = {
    "synthetic": Bed(64, 5, ("--embedding-lr", "3e-4,2e-3", "--dense-lr", "3e-4,3e-3", "--l2", "3e-5,3e-4"), SCALES),
    "criteo": Bed(8, 12, ("--embedding-lr", "6e-5,6e-4", "--dense-lr", "6e-5,6e-4", "--l2", "2e-5,2e-3")),
    "movielens": Bed(
        128,
        8,
        ("--embedding-lr", "5e-4,5e-3", "--dense-lr", "3e-4,3e-3", "--l2", "5e-7,1e-5"),
        rules=("none", *CONTRAST),
    ),
    "avazu": Bed(8, 10, scales=(1, 8, 32)),
    "frequent": Bed(
        64,
        5,
        ("--embedding-lr", "3e-4,2e-3", "--dense-lr", "3e-4,3e-3", "--l2", "3e-6,1e-4"),
        (1, 128),
        CONTRAST,
    ),
    "ml_histories": Bed(32, 0, scales=(1, 128), rules=HISTORY_RULES),
    "histories": Bed(32, 0, scales=(1, 128), rules=HISTORY_RULES),
}


@dataclass(frozen=True)
class Part:
    """A question of the study: a sweep for each variant.

    Attributes:
        beds: beds on which it is asked.
        rules: scaling rules.
        scales: multiples of the base batch size.
        clip: "on", "off" or both.
        seeds: number of seeds.
        variants: settings that differ from the tuned ones, by name; "{l2}" is the tuned value.
    """

    beds: tuple[str, ...]
    rules: tuple[str, ...]
    scales: tuple[float, ...]
    clip: str = "on"
    seeds: int = 3
    variants: tuple[tuple[str, tuple[str, ...]], ...] = (("", ()),)


def _l2(*factors: float, more: tuple[str, ...] = ()) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple((f"l2_x{factor:g}", (*more, f"optimizer.l2={{l2}}*{factor!r}")) for factor in factors)


PARTS = {
    # Which rule keeps the base's quality at 128 times its batch, and how far does it hold?
    "rules": Part(tuple(BEDS), ("half_life", *PUBLISHED), (1, 128)),
    "scales": Part(("criteo", "avazu"), CONTRAST, (8, 32, 256, 512)),
    "farther": Part(("synthetic", "movielens"), ("half_life",), (512,)),
    "smaller": Part(("synthetic",), ("half_life",), (0.25,), seeds=1),
    # Ten epochs: which rule overfits, and what stops it?
    "ten_epochs": Part(
        ("criteo",), ("half_life", *PUBLISHED), (1, 128), seeds=1, variants=(("", ("train.epochs=10",)),)
    ),
    "ten_epochs_l2": Part(
        ("criteo",), ("half_life",), (128,), seeds=1, variants=_l2(2, 4, 11, 128, more=("train.epochs=10",))
    ),
    # The learning rates fall to zero over the run.
    "decay": Part(
        ("criteo",),
        ("half_life",),
        (1, 128, 512),
        variants=(("", ('optimizer.lr_decay="linear"',)),),
    ),
    # Without the clip, which binds at Criteo's base batch.
    "clip_off": Part(("criteo",), ("half_life", "cowclip", "linear"), (1, 128), clip="off"),
    # Limits of the clip, as the paper's Table 12 varies them; half_life scales these base values.
    "limits": Part(
        ("criteo",),
        ("half_life", "cowclip"),
        (128,),
        seeds=1,
        variants=tuple(
            (f"r{r:g}_bound{bound:g}", (f"clip.r={r!r}", f"clip.bound={bound!r}"))
            for r in (0.01, 0.1, 1.0, 10.0)
            for bound in (0.0, 1e-5, 1e-3)
        ),
    ),
    # One epoch without L2; with the tuned L2 it is the first epoch of "rules".
    "one_epoch": Part(
        ("criteo",),
        ("half_life", "sqrt_star", "cowclip", "none"),
        (1, 128),
        variants=_l2(0, more=("train.epochs=1",)),
    ),
    # Histories: without the clip; with another network; is the base's rate a good one?
    "unclipped": Part(("ml_histories", "histories"), ("half_life",), (1, 128), clip="off"),
    "hstu": Part(
        ("ml_histories", "histories"),
        ("half_life", "cowclip"),
        (1, 128),
        seeds=1,
        variants=(("hstu", ('model.name="hstu"',)),),
    ),
    "rates": Part(
        ("ml_histories", "histories"),
        ("half_life",),
        (1,),
        seeds=1,
        variants=tuple(
            (f"x{factor:g}", tuple(f"optimizer.{key}={value * factor!r}" for key, value in HISTORY_RATES))
            for factor in (0.5, 2.0)
        ),
    ),
    # The other networks, at DeepFM's tuned values.
    "networks": Part(
        ("criteo",),
        ("half_life", "cowclip"),
        (1, 128),
        seeds=1,
        variants=tuple((name, (f'model.name="{name}"',)) for name in ("wdl", "dcn", "dcnmix", "dcnv2")),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder with a prepared data set for each bed")
    parser.add_argument("--output", type=Path, default=Path("runs/large_batch"), help="folder of the results")
    parser.add_argument("--beds", default=",".join(BEDS), help="beds, separated by commas")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts, separated by commas")
    arguments = parser.parse_args()
    for bed in arguments.beds.split(","):
        tuned, data = arguments.output / bed / "tune", arguments.data / bed
        if BEDS[bed].trials and not (tuned / "tuned.toml").exists():
            run(*tune(bed, data, tuned))
        for part in arguments.parts.split(","):
            for command in sweeps(bed, part, data, arguments.output / bed):
                run(*command)


def tune(bed: str, data: Path, output: Path) -> list[str]:
    """The call of `cowrec tune` for a bed."""
    size, trials = str(BEDS[bed].base), str(BEDS[bed].trials)
    config = str(HERE / f"{bed}.toml")
    places = ["--data", str(data), "--output", str(output)]
    return ["tune", config, *places, "--batch-size", size, "--trials", trials, "--patience", "1", *BEDS[bed].ranges]


def sweeps(bed: str, name: str, data: Path, output: Path) -> Iterator[list[str]]:
    """The calls of `cowrec sweep` for a part on a bed; none if it is not asked there."""
    part, base = PARTS[name], BEDS[bed]
    rules = [rule for rule in part.rules if rule in base.rules]
    sizes = [int(scale * base.base) for scale in part.scales if scale in base.scales]
    if bed not in part.beds or not sizes:
        return
    tuned = output / "tune" / "tuned.toml" if base.trials else HERE / f"{bed}.toml"
    values = tomllib.loads(tuned.read_text())
    epochs = tomllib.loads((HERE / f"{bed}.toml").read_text())["train"]["epochs"]
    for variant, settings in part.variants:
        # Trained on the whole training split, for the bed's epochs.
        fixed = ["train.validation_fraction=0", "train.patience=0", f"train.epochs={epochs}"]
        given = [setting(each, values["optimizer"]["l2"]) for each in settings]
        measured = ["evaluate.by_id_counts=true"]
        yield [
            *("sweep", str(tuned), "--data", str(data), "--output", str(output / name / variant)),
            *("--batch-sizes", ",".join(map(str, sizes)), "--rules", ",".join(rules)),
            *("--clip", part.clip, "--seeds", str(part.seeds)),
            *(argument for each in (*fixed, *given, *measured) for argument in ("--set", each)),
        ]


def setting(text: str, l2: float) -> str:
    """A value of `--set`; "{l2}*4" is four times the tuned L2."""
    key, _, value = text.partition("=")
    if value.startswith("{l2}*"):
        value = repr(l2 * float(value.removeprefix("{l2}*")))
    return f"{key}={value}"


def run(*arguments: str) -> None:
    """Runs a command of cowrec, and stops the study where it fails."""
    print("\n$ cowrec " + " ".join(arguments), file=sys.stderr, flush=True)
    ended = subprocess.run([*COWREC, *arguments], check=False)
    if ended.returncode:
        sys.exit(ended.returncode)


if __name__ == "__main__":
    main()
