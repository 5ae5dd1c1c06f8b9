"""Latency and throughput of `cowrec serve` beside other runtimes of the same network; JSON lines and a table.

    python -m scripts.peers.bench_serving --output serving_peers.jsonl

All have cowrec's HTTP server, codec and lookup of rows, and one thread; they differ in what computes probabilities from
the dense features and the looked-up rows: cowrec, the program of torch.export as it is, compiled by AOTInductor (which
needs a C++ compiler), and ONNX Runtime. Before anything is timed, their predictions must agree. The servers run all the
time and are asked in turn; a figure is the median of the rounds. Missing runtimes are named and left out:

    pip install onnxruntime onnx onnxscript

The client has a core of its own where there are several.
"""

import argparse
import dataclasses
import json
import multiprocessing
import os
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cowrec.data_pipeline.parallel import available_cores
from cowrec.data_pipeline.synthetic.drifting import DriftConfig
from cowrec.trainer.cli.flag_values import parse_list
from cowrec.trainer.export.manifest import NETWORK
from cowrec.trainer.runs.provenance import environment
from cowrec.trainer.serving import served_model
from cowrec.trainer.serving.limits import Limits
from cowrec.trainer.serving.server import serve
from scripts.load_case import CONFIG, MODEL, bodies, make_export, on_other_cores, wait_until
from scripts.open_loop import closed_loop, request_bytes, run_loop

PORT = 8130
TOLERANCE = 1e-5
CONNECTIONS = 16
Line = dict[str, Any]
Network = Callable[[Tensor, Tensor], Tensor]
"""Logits [B] of dense features [B, N] and looked-up rows [B, F, P], both float32."""


def eager(export: Path) -> nn.Module:
    return torch.export.load(export / NETWORK).module()


def aot_inductor(export: Path) -> Network:
    package = str(export.parent / "aot_inductor.pt2")
    torch._inductor.aoti_compile_and_package(torch.export.load(export / NETWORK), package_path=package)
    return torch._inductor.aoti_load_package(package)


def onnx_runtime(export: Path) -> Network:
    import onnxruntime  # type: ignore[import-not-found,unused-ignore]

    file, samples = str(export.parent / "network.onnx"), torch.export.Dim("samples")
    manifest = served_model.Manifest.load(export)
    schema = served_model.Schema.load(export)
    width = served_model.physical_dim(manifest.model.embedding_dim)
    example = torch.zeros(2, len(schema.dense)), torch.zeros(2, len(schema.sparse), width)
    torch.onnx.export(
        eager(export), example, file, dynamo=True, dynamic_shapes=({0: samples}, {0: samples}), external_data=False,
        input_names=["dense", "rows"],
    )  # fmt: skip
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def run(dense: Tensor, rows: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"dense": dense.numpy(), "rows": rows.numpy()})[0])

    return run


PEERS: dict[str, Callable[[Path], Network]] = {
    "torch.export": eager,
    "AOTInductor": aot_inductor,
    "ONNX Runtime": onnx_runtime,
}
NEEDS: dict[str, Callable[[], str]] = {
    "AOTInductor": lambda: "" if which("g++") or which("c++") else "a C++ compiler",
    "ONNX Runtime": lambda: ", ".join(each for each in ("onnxruntime", "onnx", "onnxscript") if not find_spec(each)),
}


class PeerNetwork:
    """A peer in the place of cowrec's `InferenceNetwork`."""

    def __init__(self, network: Network, logit_shift: float) -> None:
        self._network, self._shift = network, logit_shift

    def __call__(self, dense: Tensor, rows: Tensor) -> Tensor:
        if not torch.is_inference_mode_enabled():  # while the server is loading
            with torch.inference_mode():
                return self(dense, rows)
        logits = self._network(dense, rows)
        return (logits + self._shift if self._shift else logits).sigmoid()

    def with_weights(self, _: Any) -> "PeerNetwork":
        return self  # the export's


def serve_peer(name: str, export: Path, port: int, cores: set[int]) -> None:
    """Serves the export by a peer, or by cowrec; ends by a signal."""
    torch.set_num_threads(1)
    if name in PEERS:
        network = PEERS[name](export)
        vars(served_model)["InferenceNetwork"] = lambda _, shift, __: PeerNetwork(network, shift)
    os.sched_setaffinity(0, cores)
    serve(export, port=port, limits=Limits(client_connections=512))


@contextmanager
def served(names: list[str], export: Path) -> Iterator[dict[str, int]]:
    """Runs a server each; yields their ports. They share a core, as one is asked at a time."""
    context = multiprocessing.get_context("spawn")
    with on_other_cores(1) as cores, ExitStack() as stack:
        ports = {name: PORT + index for index, name in enumerate(names)}
        for name, port in ports.items():
            process = context.Process(target=serve_peer, args=(name, export, port, cores), daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(process.terminate)
        for port in ports.values():
            wait_until(port, lambda health: health["status"] == "ok", 600)
        yield ports


def require_agreement(ports: dict[str, int], body: bytes) -> float:
    """Largest difference of a peer's predictions from the first's. Raises AssertionError if it is not tolerable."""
    found = []
    for port in ports.values():
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/predict", body, timeout=60) as answer:
            content = json.load(answer)
        found.append(np.atleast_1d(content.get("probabilities", content.get("probability"))))
    difference = max(float(np.abs(each - found[0]).max()) for each in found)
    assert difference <= TOLERANCE, f"predictions of {', '.join(ports)} differ by {difference:g}"
    return difference


def measured(port: int, requests: list[bytes], count: int) -> Line:
    """Of one client for the latency, in milliseconds, and of CONNECTIONS for the throughput."""
    alone = run_loop(closed_loop("127.0.0.1", port, requests, count, 1))
    many = run_loop(closed_loop("127.0.0.1", port, requests, 2 * count, CONNECTIONS))
    answered = len(alone.latencies), len(many.latencies)
    assert answered == (count, 2 * count), (alone.statuses, many.statuses)
    p50, p99 = 1000 * np.quantile(alone.latencies, [0.5, 0.99])
    return {"p50_ms": p50, "p99_ms": p99, "requests_per_second": 2 * count / many.seconds,
            "client_cpu": many.client_cpu}  # fmt: skip


def shared_fields(body: bytes, shared: int) -> bytes:
    """A list of samples as a request of one user: the first columns of the first sample are those of all."""
    samples = json.loads(body)
    names = list(samples[0])[:shared]
    own = [{name: value for name, value in sample.items() if name not in names} for sample in samples]
    return json.dumps({"shared": {name: samples[0][name] for name in names}, "samples": own}).encode()


def available(wanted: list[str]) -> list[str]:
    """Those of the runtimes that are there; names the others."""
    found = []
    for name in wanted:
        known = name == "cowrec" or name in PEERS
        need = NEEDS.get(name, lambda: "")() if known else ""
        if known and not need:
            found.append(name)
        else:
            print(f"{name} is left out, it " + (f"needs {need}" if known else f"is none of cowrec, {', '.join(PEERS)}"))
    return found


def compared(config: DriftConfig, ports: dict[str, int], samples: int, rounds: int, seconds: float) -> Iterator[Line]:
    """Yields a line per runtime, and one of cowrec for requests that give half of the fields once."""
    contents = bodies(config, max(4, 2000 // samples), samples)
    difference = max(require_agreement(ports, body) for body in contents[:4])
    requests = [request_bytes("/predict", body) for body in contents]
    cases = {(name, False): (port, requests) for name, port in ports.items()}
    if samples > 1 and "cowrec" in ports:
        shared = [shared_fields(body, (config.fields + config.num_dense) // 2) for body in contents]
        cases["cowrec", True] = ports["cowrec"], [request_bytes("/predict", body) for body in shared]
    first = [measured(port, asked, 20) for port, asked in cases.values()]  # warms up both sides
    count = max(20, int(seconds * min(each["requests_per_second"] for each in first) / 3))
    found: dict[tuple[str, bool], list[Line]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case, (port, asked) in cases.items():
            found[case].append(measured(port, asked, count))
    for (name, is_shared), lines in found.items():
        line = {"runtime": name, "samples": samples, "shared_fields": is_shared, "difference": difference}
        yield line | {key: float(np.median([one[key] for one in lines])) for key in lines[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines to write")
    parser.add_argument("--runtimes", default=",".join(("cowrec", *PEERS)))
    parser.add_argument("--samples", default="1,32,500", help="samples (candidates) per request")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="about the time of a measurement")
    parser.add_argument("--rows", type=int, default=400_000, help="samples whose ids have a row in the model")
    arguments = parser.parse_args()
    names = available(arguments.runtimes.split(","))
    config = dataclasses.replace(CONFIG, rows=arguments.rows)
    with tempfile.TemporaryDirectory() as folder, arguments.output.open("w", encoding="utf-8", buffering=1) as file:
        make_export(config, Path(folder))
        about = {"model": dataclasses.asdict(MODEL), "rounds": arguments.rounds, "cores": available_cores()}
        about |= environment(torch.device("cpu"))
        with served(names, Path(folder) / "export") as ports:
            print("| runtime | samples | p50, ms | p99, ms | requests/s | predictions/s |\n|---|---|---|---|---|---|")
            for samples in map(int, parse_list(arguments.samples)):
                for line in compared(config, ports, samples, arguments.rounds, arguments.seconds):
                    print(summary(line), flush=True)
                    file.write(json.dumps({**line, **about}) + "\n")


def summary(line: Line) -> str:
    """A row of the table."""
    name = line["runtime"] + (", half of the fields shared" if line["shared_fields"] else "")
    return (
        f"| {name} | {line['samples']} | {line['p50_ms']:.2f} | {line['p99_ms']:.2f} |"
        f" {line['requests_per_second']:,.0f} | {line['requests_per_second'] * line['samples']:,.0f} |"
    )


if __name__ == "__main__":
    main()
