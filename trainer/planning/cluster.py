"""Description of a cluster: its hosts, devices, memory and rates, from a TOML file or a preset."""

import dataclasses
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from cowrec.trainer.config.checks import hint, require


@dataclass(frozen=True)
class Cluster:
    """`CLUSTER.toml`: equal hosts, each with equal devices; one process for each device.

    Attributes:
        hosts: number of hosts.
        devices: GPUs of a host, or processes on its CPUs.
        device: kind of device.
        memory_gb: memory of a GPU; 0 on CPU, where tables are in the host's.
        host_memory_gb: memory of a host.
        teraflops: rate of matrix products on a device, in the run's precision.
        memory_gb_per_second: bytes that a device reads and writes in its own memory.
        uvm_gb_per_second: the same in its share of the host's memory, over the bus.
        within_gb_per_second: bytes that a device sends to others of its host.
        between_gb_per_second: bytes that a device sends to other hosts.
        within_microseconds: time of a collective without bytes, within a host.
        between_microseconds: the same over several hosts.
        operator_microseconds: time of an operator without work.
        storage_gb_per_second: bytes that a host writes to the storage of checkpoints.
    """

    hosts: int = 1
    devices: int = 1
    device: Literal["cpu", "cuda"] = "cuda"
    memory_gb: float = 0.0
    host_memory_gb: float = 64.0
    teraflops: float = 1.0
    memory_gb_per_second: float = 10.0
    uvm_gb_per_second: float = 0.0
    within_gb_per_second: float = 10.0
    between_gb_per_second: float = 1.0
    within_microseconds: float = 20.0
    between_microseconds: float = 40.0
    operator_microseconds: float = 5.0
    storage_gb_per_second: float = 1.0

    def __post_init__(self) -> None:
        for name in ("hosts", "devices"):
            require(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        for each in dataclasses.fields(self):
            value, may_be_zero = getattr(self, each.name), each.name in ("memory_gb", "uvm_gb_per_second")
            if each.type is float:
                require(each.name, value, value > 0 or (may_be_zero and value == 0), "a positive number")
        if self.device == "cuda":
            require("memory_gb", self.memory_gb, self.memory_gb > 0, "the memory of a GPU")

    @property
    def ranks(self) -> int:
        """Processes of the cluster."""
        return self.hosts * self.devices


_H100 = Cluster(
    devices=8,
    memory_gb=80,
    host_memory_gb=2000,
    teraflops=400,
    memory_gb_per_second=2500,
    uvm_gb_per_second=25,
    within_gb_per_second=350,
    between_gb_per_second=40,
    operator_microseconds=30,
    storage_gb_per_second=10,
)
PRESETS: dict[str, Cluster] = {
    "dgx-h100": _H100,
    "dgx-h200": dataclasses.replace(_H100, memory_gb=141, memory_gb_per_second=3800),
    "p4d": dataclasses.replace(
        _H100,
        memory_gb=40,
        host_memory_gb=1152,
        teraflops=100,
        memory_gb_per_second=1300,
        uvm_gb_per_second=12,
        within_gb_per_second=230,
        between_gb_per_second=5,
        storage_gb_per_second=2,
    ),
    "cpu": Cluster(device="cpu", devices=2, teraflops=0.2, memory_gb_per_second=10, within_gb_per_second=1),
}
"""Common machines. Memory, links and peaks are those of the vendors' data sheets; rates are what is commonly reached of
them: 80 % of a link and of the memory's bandwidth, and 40 % of the peak in TF32. None was measured by us, except for
the order of magnitude of "cpu". "dgx-h100": 8 x H100 80 GB (TF32 989/2 TFLOP/s without sparsity, 3.35 TB/s), NVLink of
450 GB/s each way, 400 Gb/s to the network for each GPU. "p4d": AWS p4d.24xlarge, 8 x A100 40 GB (156 TFLOP/s, 1.55
TB/s), NVLink of 300 GB/s each way, 400 Gb/s for all eight. An operator takes 30 us of the host, as the 86 of a step in
docs/speed.md did on a CPU: several processes do not capture steps as a CUDA graph."""


def load_cluster(path: Path | str) -> Cluster:
    """Reads a cluster from a TOML file; the key `preset` names the preset whose values hold where the file has none.

    A name with hosts, such as "dgx-h100:8", stands for a preset without a file.

    Raises:
        ValueError: no such file or preset, an unknown key, or a value of the wrong type or out of range.
    """
    name, _, hosts = str(path).partition(":")
    if name in PRESETS and not Path(path).exists():
        if hosts and not hosts.isdecimal():
            raise ValueError(f"--cluster {path}: {hosts!r} is not a number of hosts; write {name}:8, for example")
        return dataclasses.replace(PRESETS[name], hosts=int(hosts or 1))
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; write a TOML file, or name a preset: {', '.join(PRESETS)}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    preset = values.pop("preset", None)
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"{path}: preset = {preset!r} is unknown; {hint(str(preset), list(PRESETS), 'presets')}")
    known = [each.name for each in dataclasses.fields(Cluster)]
    for key in values:
        if key not in known:
            raise ValueError(f"{path}: unknown key {key}; {hint(key, known, 'keys')}")
    start: dict[str, Any] = dataclasses.asdict(PRESETS[preset]) if preset else {}
    try:
        return TypeAdapter(Cluster).validate_json(json.dumps(start | values, default=str), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        problem = str(cause) if cause else f"{'.'.join(map(str, first['loc']))} = {first['input']!r}: {first['msg']}"
        raise ValueError(f"{path}: {problem}") from None
