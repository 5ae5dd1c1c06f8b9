"""Demo of online training and serving, compared with a model retrained daily and one never retrained.

    python scripts/online_demo.py

An application shows samples whose ids appear and disappear and whose effects drift. It requests predictions from
`cowrec serve`, then logs the labels; `cowrec online` trains on them and publishes, and the server follows. Two copies
of the same model lag behind: one applies published versions at the end of each day of sample time, like a nightly
training job, the other stops after the first days. A page that reloads itself, and a final plot, show the quality of
each by day.
"""

import argparse
import http.client
import http.server
import json
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

from cowrec.trainer.runtime.environment import prepare_process

prepare_process()  # before torch is loaded

import numpy as np
import pyarrow as pa
import torch

from cowrec.data_pipeline import SampleCodec, synthesize_drifting
from cowrec.data_pipeline.dataset.schema import LABEL
from cowrec.data_pipeline.streams.directory import DirectorySink
from cowrec.data_pipeline.synthetic.drifting import DAY, DriftConfig, DriftingModel, drifting_tables
from cowrec.data_pipeline.synthetic.planted import auc
from cowrec.trainer.publishing.follower import VersionReader
from cowrec.trainer.publishing.target import Target, open_target
from cowrec.trainer.reports.plotting import plt
from cowrec.trainer.runtime.environment import environment
from cowrec.trainer.serving.served_model import ServedModel

CONFIG = Path(__file__).resolve().parents[1] / "trainer" / "configs" / "online.toml"
DRIFT = DriftConfig(
    rows=100_000,
    days=5.0,
    core_ids=(20, 100, 500, 1_000),
    new_ids_per_day=(0, 10, 100, 400),
    lifetime_days=2.0,
    drift_days=6.0,
    id_effect=0.5,
)
FIRST_DAYS = 4
"""Days after which one model is no longer updated."""
CHUNK = 500
"""Samples shown at a time."""
PAGE = """<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="2"><title>cowrec online</title>
<img src="online_demo.png" style="max-width: 100%">"""
NAMES = {"online": "online, as served", "daily": "retrained daily", "never": "never retrained"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/online_demo"), help="folder, new or empty")
    parser.add_argument("--days", type=int, default=16, help="days of sample time")
    parser.add_argument("--rate", type=float, default=3000.0, help="samples per second")
    parser.add_argument("--port", type=int, default=8010, help="port of the page; the server uses the next one")
    arguments = parser.parse_args()
    folder: Path = arguments.output
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"{folder} is not empty; remove it, or choose another --output")
    (folder / "incoming").mkdir(parents=True)
    synthesize_drifting(folder / "data", DRIFT, test_rows=1000)
    (folder / "index.html").write_text(PAGE)
    with ExitStack() as running:
        running.enter_context(page(folder, arguments.port))
        print(f"page: http://127.0.0.1:{arguments.port}", flush=True)
        running.enter_context(command(folder, "online", *online_arguments(folder)))
        wait_for(lambda: list((folder / "published").glob("*.cow")), "the trainer's first version")
        serve = ("serve", str(folder / "live" / "base"), "--follow", str(folder / "published"))
        running.enter_context(command(folder, *serve, "--port", str(arguments.port + 1)))
        server = http.client.HTTPConnection("127.0.0.1", arguments.port + 1)
        wait_for(partial(ready, server), "the server")
        demo = Demo(folder, server)
        days = demo.show(arguments.days, arguments.rate)
    lines = [{"day": day, **values} for day, values in days.items()]
    about = {"drift": asdict(DRIFT), "rate": arguments.rate, **environment(torch.device("cpu"))}
    with (folder / "online_demo.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({**line, **about}) + "\n" for line in lines)
    print(f"\nplot: {folder / 'online_demo.png'}, numbers: {folder / 'online_demo.jsonl'}")


class Demo:
    """Application and the two models that lag behind."""

    def __init__(self, folder: Path, server: http.client.HTTPConnection):
        self.folder, self.server = folder, server
        self.codec = SampleCodec.load(folder / "data")
        self.lagging = {name: LaggingModel(folder) for name in ("daily", "never")}
        self.seen: dict[int, dict[str, list[np.ndarray]]] = defaultdict(lambda: defaultdict(list))

    def show(self, days: int, rate: float) -> dict[int, dict[str, float]]:
        """Shows the samples of some days; returns the AUC of each model by day, and the best possible."""
        rows = round(days * DRIFT.rows / DRIFT.days)
        draw = DriftingModel.of(DRIFT).draw(0, rows)
        assert draw.times is not None
        of_days = [(draw.times - DRIFT.start) // DAY == day for day in range(days)]
        best = [auc(draw.logits[each], draw.labels[each]) for each in of_days]
        found: dict[int, dict[str, float]] = {}
        began, shown, today = time.monotonic(), 0, 0
        sink = DirectorySink(self.folder / "incoming")
        for table in drifting_tables(DRIFT, 0, rows, CHUNK):
            day = int(table["time"][0].as_py() - DRIFT.start) // DAY
            if day > today:
                self.tell(found, today, best)
                self.lagging["daily"].catch_up()
                if day <= FIRST_DAYS:
                    self.lagging["never"].catch_up()
                today = day
            self.predict_all(day, table)
            sink.write(table)
            shown += len(table)
            time.sleep(max(0.0, began + shown / rate - time.monotonic()))
        self.tell(found, today, best)
        return found

    def tell(self, found: dict[int, dict[str, float]], day: int, best: Sequence[float]) -> None:
        """Measures the predictions of a day that has ended, and plots all days."""
        found[day] = {**self.quality(day), "best": best[day]}
        print(f"day {day}:  " + "  ".join(f"{key} {each:.4f}" for key, each in found[day].items()), flush=True)
        plot(found, self.folder / "online_demo.png")

    def predict_all(self, day: int, table: pa.Table) -> None:
        """Records the predictions of all three models before any sees the labels."""
        of_day = self.seen[day]
        of_day["label"].append(table[LABEL].to_numpy())
        of_day["online"].append(self.ask(table))
        samples = self.codec.encode(self.codec.from_table(table)).block
        for name, model in self.lagging.items():
            of_day[name].append(model.served.predict(samples))

    def ask(self, table: pa.Table) -> np.ndarray:
        """Returns the server's predictions."""
        samples = [{key: value for key, value in each.items() if key != LABEL} for each in table.to_pylist()]
        self.server.request("POST", "/predict", json.dumps(samples))
        answer = self.server.getresponse()
        content = json.loads(answer.read())
        if answer.status != 200:
            raise SystemExit(f"the server answered {answer.status}: {content}")
        return np.array(content["probabilities"])

    def quality(self, day: int) -> dict[str, float]:
        columns = {name: np.concatenate(parts) for name, parts in self.seen.pop(day).items()}
        return {name: auc(columns[name], columns["label"]) for name in NAMES}


class LaggingModel:
    """Copy of the model that applies published versions on request."""

    def __init__(self, folder: Path):
        self.served = ServedModel.load(folder / "live" / "base")
        self._target: Target = open_target(str(folder / "published"))
        self._follower = VersionReader(self._target)

    def catch_up(self) -> None:
        newest, stop = self._target.blobs()[-1][0], threading.Event()
        while self._follower.version < newest:
            self.served.apply(next(self._follower.versions(stop)))


def online_arguments(folder: Path) -> list[str]:
    """Returns arguments of `cowrec online`, which accept samples of any age."""
    given = ["--data", "data", "--source", "incoming", "--run-dir", "live", "--publish", "published"]
    for flag in range(1, len(given), 2):
        given[flag] = str(folder / given[flag])
    settings = ("online.publish_seconds=0.5", "online.dense_seconds=0.5", "online.lateness=''")
    return [str(CONFIG), *given, *(part for each in settings for part in ("--set", each))]


@contextmanager
def command(folder: Path, *arguments: str) -> Iterator[None]:
    """Runs a cowrec command with its output in a file; stops it at the end."""
    with (folder / f"{arguments[0]}.log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-m", "cowrec.trainer", *arguments], stdout=log, stderr=log)
        try:
            yield
            if process.poll() is not None:
                raise SystemExit(f"cowrec {arguments[0]} ended; see {log.name}")
        finally:
            process.terminate()
            process.wait()


@contextmanager
def page(folder: Path, port: int) -> Iterator[None]:
    """Serves the page on loopback."""
    handler = partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def ready(server: http.client.HTTPConnection) -> bool:
    try:
        server.request("GET", "/readyz")
        answer = server.getresponse()
        answer.read()
        return answer.status == 200
    except OSError:
        server.close()
        return False


def wait_for(happened: Callable[[], object], what: str, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > end:
            raise SystemExit(
                f"{what} was not ready within {seconds:.0f} seconds; see the .log files in the demo's folder"
            )
        time.sleep(0.1)


def plot(days: dict[int, dict[str, float]], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(9, 4.5), layout="constrained")
    axis.plot(list(days), [day["best"] for day in days.values()], color="gray", ls="--", label="best possible")
    for name, label in NAMES.items():
        axis.plot(list(days), [day[name] for day in days.values()], "o-", label=label)
    axis.axvline(FIRST_DAYS - 0.5, color="black", lw=0.5)
    axis.set(xlabel="day of sample time", ylabel="AUC of the day's predictions")
    axis.grid(alpha=0.3)
    axis.legend(loc="lower left")
    figure.suptitle(f"{DRIFT.rows / DRIFT.days:,.0f} samples per day; half of them show ids that live for days")
    partial_file = path.with_suffix(".partial.png")
    figure.savefig(partial_file, dpi=110)
    plt.close(figure)
    partial_file.rename(path)


if __name__ == "__main__":
    main()
