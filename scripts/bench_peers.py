"""Benchmark of training speed against other libraries on the same ids, model, machine and number of threads.

    python scripts/bench_peers.py --output peers.jsonl
    python scripts/bench_peers.py --output few.jsonl --only cowrec-fp32,torch-sparse-adam --batch-sizes 8K
    python scripts/bench_peers.py --output din.jsonl --histories DATA/ml_histories --network din

All train DeepFM (embeddings of 10, MLP 400-400-400) on the samples of `cowrec bench`. They run in turns over several
rounds, each turn in a new process, so that variations of the machine affect all alike. Peers other than plain PyTorch
and TorchRec are installed into their own virtual environments, which are reused.

`--histories` trains a network here and elsewhere on a prepared data set with a history instead, in turns, a line for
each run: test AUC by epoch, and training samples/s. DIN is compared with FuxiCTR's layers, BST and HSTU with plain
PyTorch. Apart from sizes and Adam, "defaults" are each one's own, those of `cowrec train` and FuxiCTR's Dice and 1e-3.
In "matched", both have PReLU, constant rates of 1e-3, initial rows of deviation 1e-4, and neither L2 nor CowClip.
"""

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cowrec.trainer.runtime.environment import PROCESS_SETTINGS, prepare_process

if __name__ == "__main__":
    prepare_process()  # before torch is loaded

import numpy as np
import torch

from cowrec.data_pipeline import Schema
from cowrec.data_pipeline.dataset.schema import SparseField
from cowrec.data_pipeline.synthetic.criteo_frequencies import NUM_DENSE
from cowrec.data_pipeline.synthetic.criteo_ids import CriteoIds
from cowrec.names import hint, parse_count
from cowrec.sparse_opt.versions import MATCHED_SETS
from cowrec.trainer.bench.criteo import Bench, Case, cases, measure_criteo, run_ids
from cowrec.trainer.bench.parts import LEAST_STEPS, speed
from cowrec.trainer.cli.flags import parse_list, parse_table_rows
from cowrec.trainer.reports.plotting import plt, size_name
from cowrec.trainer.reports.text_table import aligned
from cowrec.trainer.runs.run_dir import to_json
from cowrec.trainer.runtime.environment import environment
from cowrec.trainer.runtime.errors import ProcessFailed
from cowrec.trainer.runtime.subprocess_call import Subprocess

ROOT = Path(__file__).resolve().parents[1]
BASELINE = "torch-sparse-adam"
_SPEED = "samples_per_second"
_FASTEST = 200_000
"""Samples per second above which no more batches are prepared."""
PARTS = ("l2_on_every_row", "cowclip", "absent_rows_move")
"""Parts of the full algorithm: L2 in the gradient of every row at every step, the clip, updates of absent rows."""


@dataclass(frozen=True)
class Peer:
    """Library to compare with: its module in scripts/peers, the PARTS it implements, and its packages.

    Without `requirements` it runs in cowrec's environment, otherwise in its own.
    """

    worker: str
    does: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()


COWREC: dict[str, Literal["float32", "bfloat16"]] = {"cowrec-fp32": "float32", "cowrec-bf16": "bfloat16"}
"""Value of train.precision for each name."""
_UNCLIPPED = ("l2_on_every_row", "absent_rows_move")
_TORCH = (f"torch=={MATCHED_SETS[0].torch}", "numpy==2.4.6")
PEERS = {
    "torch-sparse-adam": Peer("torch_sparse_adam"),
    "torch-dense-adam-cowclip": Peer("torch_dense_adam_cowclip", PARTS),
    "torchrec-fused-adagrad": Peer("torchrec_fused_adagrad"),
    # deepctr-torch imports requests without declaring it.
    "deepctr-torch": Peer("deepctr_torch_adam", _UNCLIPPED, ("deepctr-torch==0.3.0", "requests==2.34.2", *_TORCH)),
    "fuxictr": Peer("fuxictr_adam", _UNCLIPPED, ("fuxictr==2.3.10", *_TORCH)),
    "deepctr": Peer("deepctr_keras", _UNCLIPPED, ("deepctr==0.9.4", "tensorflow-cpu==2.21.0", "tf-keras==2.21.0")),
}
HISTORIES = {"batch_size": 1024, "epochs": 3, "embedding_dim": 10, "hidden": [512, 128, 64], "attention": 64}
OF_HISTORIES = {"din": "fuxictr_din", "bst": "torch_histories", "hstu": "torch_histories"}
"""Module in scripts/peers of each network."""
MATCHED = (
    *("optimizer.base_batch_size=1024", "optimizer.embedding_lr=1e-3", "optimizer.dense_lr=1e-3", "optimizer.l2=0"),
    *("optimizer.lr_decay=none", "optimizer.warmup_epochs=0", "optimizer.embedding_init_std=1e-4", "clip.rule=none"),
    "train.average=false",
)
DOES = {**dict.fromkeys(COWREC, PARTS), **{name: peer.does for name, peer in PEERS.items()}}


@dataclass
class Turns:
    """Result of an implementation at a batch size: seconds of each step and package versions, or an error."""

    step_seconds: list[float]
    versions: dict[str, str]
    error: str | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines to write; a plot is added")
    parser.add_argument("--only", default=",".join(DOES), help="implementations to measure [%(default)s]")
    parser.add_argument("--batch-sizes", default="1K,8K,64K", help="K is 1024 [%(default)s]")
    parser.add_argument("--rows", default="100000", help="maximum rows per table, or full [%(default)s]")
    parser.add_argument("--epoch-share", type=float, default=0.9, help="share of an epoch before timing [%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each implementation [%(default)s]")
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of a turn, at least 5 steps [%(default)s]")
    parser.add_argument("--histories", type=Path, help="compare a network on this data set; --rounds is of seeds")
    parser.add_argument("--network", choices=OF_HISTORIES, default="din", help="network of --histories [%(default)s]")
    parser.add_argument(
        "--venvs", type=Path, default=ROOT / "build" / "peers", help="virtual environments [%(default)s]"
    )
    arguments = parser.parse_args()
    if arguments.output.exists():
        parser.error(f"--output {arguments.output} exists; move it, or choose another file")
    try:
        names = list(dict.fromkeys(parse_list(arguments.only)))
        for name in names:
            if name not in DOES:
                raise ValueError(f"--only {name!r} is not known; {hint(name, DOES)}")
        sizes = [parse_count(each, "a batch size") for each in parse_list(arguments.batch_sizes)]
        rows = parse_table_rows(arguments.rows)
        flags = {"max_rows": rows, "epoch_share": arguments.epoch_share, "seconds": arguments.seconds}
        settings = Bench(modes=("replay",), batch_sizes=sizes, **flags)
        if arguments.rounds < 1:
            raise ValueError(f"--rounds must be at least 1, got {arguments.rounds}")
        if not arguments.output.absolute().parent.is_dir():
            raise ValueError(f"the folder of --output {arguments.output} does not exist; create it")
        if arguments.histories:
            _history_of(Schema.load(arguments.histories))
    except ValueError as error:
        parser.error(str(error))
    if arguments.histories:
        bench_histories(arguments.network, arguments.histories, arguments.rounds, arguments.venvs, arguments.output)
        return
    lines = bench_peers(names, settings, arguments.rounds, arguments.venvs, arguments.output)
    measured = [line for line in lines if line["error"] is None]
    drawn = f", plot: {plot(measured, arguments.output.with_suffix('.png'))}" if measured else ""
    print(f"{table(lines)}\n\n{arguments.output}{drawn}")
    sys.exit(len(measured) < len(lines))


def bench_peers(names: list[str], settings: Bench, rounds: int, venvs: Path, output: Path) -> list[dict[str, Any]]:
    """Measures and writes one JSON line per implementation and batch size, as soon as its rounds are complete.

    Returns:
        The lines. samples_per_second and step_ms are medians over the steps of all rounds, or None if an
        implementation failed; error is then the reason.
    """
    pythons, unusable = _pythons(names, venvs)
    ids = CriteoIds(max_rows=settings.max_rows)
    lines = []
    with tempfile.TemporaryDirectory() as folder, output.open("w", encoding="utf-8", buffering=1) as file:
        last_samples = Path(folder) / "last_samples.npy"
        np.save(last_samples, run_ids(ids, settings.samples))
        for case in cases(settings, ids, last_samples):
            most = max(LEAST_STEPS, int(_FASTEST * case.seconds / case.batch_size))
            case = dataclasses.replace(case, max_steps=min(case.max_steps, most))
            _save_samples(case, Path(folder))
            results = {name: Turns([], {}, unusable.get(name)) for name in names}
            for _ in range(rounds):
                for name, turns in results.items():
                    if turns.error is None:
                        _take_turn(name, turns, case, Path(folder), pythons)
            for name, turns in results.items():
                lines.append(_line(name, turns, case, settings))
                file.write(to_json(lines[-1]) + "\n")
                print(_short(lines[-1]), file=sys.stderr, flush=True)
    return lines


def bench_histories(network: str, data: Path, seeds: int, venvs: Path, output: Path) -> None:
    """Trains a network here and elsewhere in turns, and writes a JSON line for each run."""
    history, worker, python, peer = _history_of(Schema.load(data)), OF_HISTORIES[network], sys.executable, "torch"
    if network == "din":
        peer = "fuxictr"
        pythons, unusable = _pythons([peer], venvs)
        if unusable:
            raise ProcessFailed(unusable[peer])
        python = pythons[peer]
    train = [sys.executable, "-m", "cowrec.trainer", "train"]
    sizes = [f"model.{key}={HISTORIES[key]}" for key in ("embedding_dim", "hidden")]
    sizes += [f"train.{key}={HISTORIES[key]}" for key in ("batch_size", "epochs")]
    sizes += [f"model.options.attention={HISTORIES['attention']}"] if network == "din" else []
    with output.open("w", encoding="utf-8", buffering=1) as file:
        for seed, matched, name in itertools.product(range(seeds), (False, True), ("cowrec-fp32", peer)):
            if (matched, name) == (False, "torch"):
                continue  # has no defaults
            line: dict[str, Any] = {"implementation": name, "settings": ("defaults", "matched")[matched], "seed": seed}
            line |= {"network": network, **HISTORIES, "data": data.name}
            line |= {"load": os.getloadavg()[0], **environment(torch.device("cpu"))}
            with tempfile.TemporaryDirectory() as folder:
                if name == peer:
                    found = Path(folder) / "result.json"
                    job = {"network": network, **HISTORIES, "data": str(data.resolve()), "seed": seed}
                    job |= {"item": history.shares, "history": history.name, "result": str(found)}
                    job |= {"activation": "PReLU" if matched else "Dice"}
                    _run([python, "-m", f"scripts.peers.{worker}", json.dumps(job)])
                    line |= json.loads(found.read_text(encoding="utf-8"))
                else:
                    (Path(folder) / "run.toml").write_text(f'model.name = "{network}"\n')
                    given = [*sizes, f"train.seed={seed}", *(MATCHED if matched else ())]
                    settings = [part for each in given for part in ("--set", each)]
                    places = ["--data", str(data.resolve()), "--run-dir", f"{folder}/run"]
                    _run([*train, f"{folder}/run.toml", *places, *settings])
                    report = json.loads((Path(folder) / "run" / "report.json").read_text(encoding="utf-8"))
                    line |= {"auc": [each["auc"] for each in report["epochs"]], _SPEED: report[_SPEED]}
            file.write(to_json(line) + "\n")
            aucs = " ".join(f"{100 * auc:.2f}" for auc in line["auc"])
            print(f"{name}, {line['settings']}, seed {seed}: AUC {aucs}, {line[_SPEED]:,.0f} samples/s", flush=True)


def _history_of(schema: Schema) -> SparseField:
    """The history that a network reads. Raises ValueError for a data set that is not measured after each epoch."""
    history = next((field for field in schema.sparse if field.shares), None)
    if history is None:
        raise ValueError("the data set has no sequence that shares the table of a field; --histories needs one")
    if "validation" in schema.splits and schema.split("validation").rows:
        raise ValueError(
            "the data set has a validation split, so that test AUC is measured once; prepare it with"
            " prepare.validation_fraction=0"
        )
    return history


def table(lines: list[dict[str, Any]]) -> str:
    """Formats samples/s by batch size, ratios to plain PyTorch, and the parts of the algorithm each one implements."""
    names = list(dict.fromkeys(line["implementation"] for line in lines))
    sizes = list(dict.fromkeys(line["batch_size"] for line in lines))
    speeds = {(line["implementation"], line["batch_size"]): line[_SPEED] for line in lines}
    speed_rows, ratio_rows = [["samples/s", *map(size_name, sizes)]], [[f"/ {BASELINE}", *map(size_name, sizes)]]
    for name in names:
        own = [speeds[name, size] for size in sizes]
        speed_rows.append([name, *(f"{speed:,.0f}" if speed else "failed" for speed in own)])
        baseline = [speeds.get((BASELINE, size)) for size in sizes]
        pairs = zip(own, baseline, strict=True)
        ratio_rows.append([name, *(f"{one / other:.2f}" if one and other else "-" for one, other in pairs)])
    does_rows = [["implements", *(part.replace("_", " ") for part in PARTS), "full algorithm"]]
    for name in names:
        parts = [part in DOES[name] for part in PARTS]
        does_rows.append([name, *("yes" if each else "-" for each in (*parts, all(parts)))])
    return "\n\n".join(aligned(rows) for rows in (speed_rows, ratio_rows, does_rows))


def plot(lines: list[dict[str, Any]], path: Path) -> Path:
    """Plots bars of samples/s at the largest batch size up to 8,192, with quartiles, in groups of the same work."""
    sizes = sorted({line["batch_size"] for line in lines})
    size = max((size for size in sizes if size <= 8192), default=sizes[0])
    shown = [line for line in lines if line["batch_size"] == size]
    figure, axis = plt.subplots(figsize=(8.3, 4.6), layout="constrained")
    place, names = 0.0, {}
    for work, of_group in itertools.groupby(sorted(shown, key=lambda line: _WORK.index(work_of(line))), work_of):
        axis.text(0, place, work, fontweight="bold", va="center")
        for line in sorted(of_group, key=lambda line: -line[_SPEED]):
            place += 1
            thousands, quartiles = line[_SPEED] / 1000, [quartile / 1000 for quartile in line[f"{_SPEED}_quartiles"]]
            color = "C0" if line["implementation"] in COWREC else "0.6"
            spread = [[thousands - quartiles[0]], [quartiles[1] - thousands]]
            axis.barh([place], [thousands], xerr=spread, color=color, ecolor="0.3", capsize=2, height=0.7)
            axis.text(quartiles[1], place, f"  {thousands:.0f}", va="center")
            names[place] = line["implementation"]
        place += 1.2
    axis.set(yticks=list(names), yticklabels=list(names.values()), ylim=(place - 0.6, -0.7))
    axis.spines[["top", "right"]].set_visible(False)
    versions = {line["versions"]["torch"] for line in shown if line["implementation"] in COWREC}
    axis.set_xlabel(
        f"thousands of training samples a second, median and quartiles\nDeepFM at batch {size:,}, {lines[0]['device']},"
        f" {lines[0]['threads']} threads; cowrec with torch {', '.join(sorted(versions))}"
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


_WORK = (
    "L2, Adam and the clip on every row",
    "L2 and Adam on every row, no clip",
    "only the rows of the batch, no L2, no clip",
)


def work_of(line: dict[str, Any]) -> str:
    """The group of an implementation, by what it computes."""
    return _WORK[0 if line["cowclip"] else 1 if line["absent_rows_move"] else 2]


def _pythons(names: list[str], venvs: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the interpreter of each peer, and errors of those without. Reuses complete environments."""
    pythons, unusable = {}, {}
    for name in names:
        requirements = PEERS[name].requirements if name in PEERS else ()
        pythons[name] = sys.executable
        if not requirements:
            continue
        pythons[name] = str(venvs.resolve() / name / "bin" / "python")
        complete = venvs / name / "requirements.txt"
        wanted = "\n".join(requirements)
        if complete.is_file() and complete.read_text(encoding="utf-8") == wanted:
            continue
        print(f"{name}: installing {', '.join(requirements)} into {venvs / name}", file=sys.stderr, flush=True)
        try:
            _run([sys.executable, "-m", "venv", "--clear", str(venvs / name)])
            _run([pythons[name], "-m", "pip", "install", "--quiet", *requirements])
        except ProcessFailed as error:
            unusable[name] = f"cannot be installed: {error}"
        else:
            complete.write_text(wanted, encoding="utf-8")
    return pythons, unusable


def _save_samples(case: Case, folder: Path) -> None:
    """Saves the samples of cowrec's own measurement; dense features and labels are noise, as there."""
    count = (case.warmup_steps + case.max_steps) * case.batch_size
    random = np.random.default_rng(0)
    np.save(folder / "ids.npy", case.ids.rows(case.steps_before * case.batch_size, count))
    np.save(folder / "dense.npy", random.random((count, NUM_DENSE), np.float32) ** 3)
    np.save(folder / "label.npy", (random.random(count) < 0.25).astype(np.float32))


def _take_turn(name: str, turns: Turns, case: Case, folder: Path, pythons: dict[str, str]) -> None:
    """Adds the steps of one process of the implementation, or its error."""
    try:
        if name in COWREC:
            train = dataclasses.replace(case.config.train, precision=COWREC[name])
            config = dataclasses.replace(case.config, train=train)
            with Subprocess() as process:
                speeds, *_ = process.each(measure_criteo, dataclasses.replace(case, config=config))
            turns.step_seconds += speeds["step_seconds"]
            turns.versions = environment(torch.device("cpu"))["versions"]
        else:
            found = _measure_peer(PEERS[name], case, folder, pythons[name])
            turns.step_seconds += found["step_seconds"]
            turns.versions = found["versions"]
    except ProcessFailed as error:
        turns.error = str(error)


def _measure_peer(peer: Peer, case: Case, folder: Path, python: str) -> dict[str, Any]:
    job = {
        "folder": str(folder),
        "table_rows": case.ids.table_rows.tolist(),
        "batch_size": case.batch_size,
        "warmup_steps": case.warmup_steps,
        "least_steps": LEAST_STEPS,
        "seconds": case.seconds,
        "result": str(folder / "result.json"),
    }
    _run([python, "-m", f"scripts.peers.{peer.worker}", json.dumps(job)])
    return dict(json.loads((folder / "result.json").read_text(encoding="utf-8")))


def _run(command: list[str]) -> None:
    """Runs a command with as many threads as cowrec, without the environment variables that cowrec sets for itself.

    Raises:
        ProcessFailed: the command failed; the message is its last line of stderr.
    """
    variables = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    threads = dict.fromkeys(variables, str(torch.get_num_threads()))
    inherited = {name: value for name, value in os.environ.items() if name not in PROCESS_SETTINGS}
    ended = subprocess.run(command, cwd=ROOT, env=inherited | threads, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        errors = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        raise ProcessFailed(errors[-1])


def _short(line: dict[str, Any]) -> str:
    result = line["error"] or f"{line[_SPEED]:,.0f} samples/s, {line['step_ms']:.1f} ms a step"
    return f"{line['implementation']}, batch {size_name(line['batch_size'])}: {result}"


def _line(name: str, turns: Turns, case: Case, settings: Bench) -> dict[str, Any]:
    line: dict[str, Any] = {
        "implementation": name,
        "batch_size": case.batch_size,
        _SPEED: None,
        f"{_SPEED}_quartiles": None,
        "step_ms": None,
        "steps": len(turns.step_seconds),
        "error": turns.error,
        "model": settings.model,
        "max_rows": settings.max_rows,
        **{part: part in DOES[name] for part in PARTS},
        **environment(torch.device("cpu")),
        "versions": turns.versions,
    }
    if turns.error is None:
        line |= speed(case.batch_size, turns.step_seconds)
    return line


if __name__ == "__main__":
    main()
