"""Shows why to learn online: tastes drift, and an online model, one retrained daily and one never are measured beside.

    python scripts/online_demo.py            (live page: http://127.0.0.1:8900)

An application asks `cowrec serve` about samples, whose tastes drift, and then logs them to a folder; `cowrec online`
trains on what it finds there and publishes, which the server follows. A day of sample time lasts seconds. The plot has,
for each day, the AUC on its samples: of the online model before it trained on them, of the server's answers before
they were logged, of a model trained on the days before, of one trained on the first days only, and the best possible.
"""

import argparse
import contextlib
import functools
import http.server
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from cowrec.data_pipeline.drifting import DAY, DriftConfig
from cowrec.data_pipeline.drifting_samples import best_by_window, drifting_tables, synthesize_drifting
from cowrec.data_pipeline.ranking import exact_auc
from cowrec.data_pipeline.sample_sinks import DirectorySink
from cowrec.data_pipeline.stream_directory import END
from cowrec.trainer.cli import quiet_libraries
from cowrec.trainer.saved_run import evaluate_run

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CONFIG = Path(__file__).parent / "configs" / "online_demo.toml"
FIRST_DAYS = 3
PACE = 40_000
"""Samples of a day."""
DRIFT = DriftConfig(
    rows=FIRST_DAYS * PACE,
    days=FIRST_DAYS,
    core_ids=(20, 100, 500, 1000),
    births_per_day=(0, 10, 50, 200),
    lifetime_days=3.0,
    drift_days=5.0,
    id_effect=0.5,
    interaction_effect=0.1,
)
ONLINE, SERVED, BEST = "online", "online, as served", "best possible"
DAILY, NEVER = "retrained daily", "never retrained"
CHUNK = 1000
"""Samples of a request, and of a file."""
STYLES = {BEST: ("gray", "--"), ONLINE: ("C0", "-"), SERVED: ("C0", ":"), DAILY: ("C1", "-"), NEVER: ("C3", "-")}
PAGE = """<!doctype html><title>cowrec online</title><meta http-equiv="refresh" content="3">
<body style="font-family: sans-serif"><h1>Learning online</h1><img src="online_demo.png" style="max-width: 100%">
<p>Progressive AUC by day of sample time; this page renews itself.</p>"""

Curves = dict[str, dict[int, float]]
"""AUC by name and day."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/online_demo"), help="folder, made anew")
    parser.add_argument("--days", type=int, default=10, help="of sample time that are streamed")
    parser.add_argument("--rate", type=float, default=4000.0, help="samples a second")
    parser.add_argument("--port", type=int, default=8900, help="of the live page")
    arguments = parser.parse_args()
    folder: Path = arguments.output
    quiet_libraries()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "index.html").write_text(PAGE)
    synthesize_drifting(folder / "data", DRIFT, test_rows=1)
    demo = Demo(folder, arguments.days)
    port = free_port()
    with page(folder, arguments.port), ExitStack() as running:
        application = threading.Thread(target=demo.apply, args=(port, arguments.rate), daemon=True)
        application.start()
        await_path(folder / "samples")
        online = ["online", CONFIG, "--data", folder / "data", "--source", folder / "samples"]
        online += ["--run-dir", folder / "live", "--publish", folder / "published"]
        trainer = running.enter_context(cowrec(folder, "online", *online))
        await_path(folder / "live" / "base" / "manifest.json")
        serve = ["serve", folder / "live" / "base", "--follow", folder / "published", "--port", port]
        running.enter_context(cowrec(folder, "serve", *serve))
        while trainer.poll() is None or application.is_alive() or demo.due_days():
            demo.step()
            if not (application.is_alive() or (folder / "samples" / END).exists()):
                raise RuntimeError("the application ended before its last sample")
            if trainer.poll():
                raise RuntimeError(f"cowrec online ended with exit code {trainer.returncode}; see {folder}/online.log")
        demo.step()
    print(f"\n{demo.table()}\n\nplot: {folder / 'online_demo.png'}")


class Demo:
    """What is known so far, and what brings it on."""

    def __init__(self, folder: Path, days: int) -> None:
        self.folder, self.days, self.logged = folder, days, 0
        windows = best_by_window(DRIFT, 0, days * PACE)
        self.curves: Curves = {name: {} for name in STYLES}
        self.curves[BEST] = {day: window["auc"] for day, window in enumerate(windows)}

    def step(self) -> None:
        """Trains the models of the next day that is over, and draws what there is."""
        for day in self.due_days()[:1]:
            self._train_daily(day)
        for line in window_lines(self.folder / "live" / "metrics.jsonl"):
            self.curves[ONLINE][(line["start"] - DRIFT.start) // DAY] = line["auc"]
        self._draw()
        time.sleep(0.5)

    def due_days(self) -> list[int]:
        """Days whose samples have all come, so that models of the days before could be measured on them."""
        return [day for day in range(FIRST_DAYS, self.logged // PACE) if day not in self.curves[DAILY]]

    def apply(self, port: int, rate: float) -> None:
        """The application: asks the server, once it is up, about samples, and then logs them, `rate` a second."""
        logits: dict[int, list[np.ndarray]] = {}
        labels: dict[int, list[np.ndarray]] = {}
        sink, start = DirectorySink(self.folder / "samples"), time.monotonic()
        for table in drifting_tables(DRIFT, 0, self.days * PACE, CHUNK):
            answer = asked(port, table.drop_columns(["label", "time", "sample_id"]).to_pylist())
            if answer:
                day = (table["time"][0].as_py() - DRIFT.start) // DAY
                logits.setdefault(day, []).append(np.asarray(answer))
                labels.setdefault(day, []).append(table["label"].to_numpy())
                self.curves[SERVED][day] = exact_auc(np.concatenate(logits[day]), np.concatenate(labels[day]))
            sink.write(table)
            self.logged += table.num_rows
            time.sleep(max(0.0, start + self.logged / rate - time.monotonic()))
        sink.end()

    def _train_daily(self, day: int) -> None:
        data = self.folder / f"day_{day}"
        synthesize_drifting(data, DRIFT, first_row=(day - FIRST_DAYS) * PACE, test_rows=PACE)
        run = self.folder / f"trained_{day}"
        with cowrec(self.folder, f"train_{day}", "train", CONFIG, "--data", data, "--run-dir", run) as process:
            process.wait()
        self.curves[DAILY][day] = json.loads((run / "report.json").read_text())["auc"]
        self.curves[NEVER][day] = evaluate_run(self.folder / f"trained_{FIRST_DAYS}", data, "test")["auc"]

    def _draw(self) -> None:
        figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
        for name, (color, style) in STYLES.items():
            points = sorted(self.curves[name].items())
            if points:
                axes.plot(*zip(*points, strict=True), color=color, linestyle=style, marker=".", label=name)
        axes.axvspan(0, FIRST_DAYS - 0.5, color="0.95")
        axes.set(xlim=(-0.3, self.days - 0.7), xlabel="day of sample time", ylabel="AUC on the day's samples")
        axes.legend(fontsize="small", ncols=2)
        partial = self.folder / ".online_demo.png"
        figure.savefig(partial, dpi=120, format="png")
        partial.rename(self.folder / "online_demo.png")
        plt.close(figure)

    def table(self) -> str:
        """AUC by day."""
        lines = ["day  " + "  ".join(f"{name:>17}" for name in STYLES)]
        for day in range(self.days):
            cells = [f"{self.curves[name].get(day, float('nan')):>17.4f}" for name in STYLES]
            lines.append(f"{day:>3}  " + "  ".join(cells))
        return "\n".join(lines)


def window_lines(metrics: Path) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl of kind "window", as far as it is written."""
    for line in metrics.read_text().splitlines() if metrics.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):  # half a line
            content = json.loads(line)
            if content["kind"] == "window":
                yield content


def asked(port: int, samples: list[dict[str, Any]]) -> list[float]:
    """The server's probabilities; none as long as it is not up, or still loading."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/predict", json.dumps(samples).encode(), method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            probabilities: list[float] = json.load(answer)["probabilities"]
            return probabilities
    except OSError:
        return []


@contextmanager
def cowrec(folder: Path, name: str, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """A cowrec command in a process of its own, what it says in a file; it is ended with the block."""
    with (folder / f"{name}.log").open("wb") as log:
        command = [sys.executable, "-m", "cowrec.trainer", *map(str, arguments)]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


@contextmanager
def page(folder: Path, port: int) -> Iterator[None]:
    """The folder's live page on this machine."""
    handler = functools.partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(f"live page: http://127.0.0.1:{server.server_port}", flush=True)
        yield
        server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Says nothing about requests."""

    def log_message(self, format: str, *args: object) -> None:
        pass


def await_path(path: Path) -> None:
    """Until it is there."""
    while not path.exists():
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
