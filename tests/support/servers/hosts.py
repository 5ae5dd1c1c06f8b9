"""Hosts of a test on one machine: network namespaces with addresses and names of their own, connected by a bridge.

Needs root on Linux, with `ip` of iproute2.
"""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

_NUMBERS = itertools.count()


class Hosts:
    """``count`` hosts, which the names "host1", "host2", ... resolve to on each of them; ``folder`` has their logs."""

    def __init__(self, count: int, folder: Path) -> None:
        self.names = [f"host{number + 1}" for number in range(count)]
        self._id = f"c{os.getpid() % 100_000}{chr(97 + next(_NUMBERS) % 26)}"
        self._folder, self._started = folder, dict[str, subprocess.Popen[bytes]]()
        folder.mkdir(parents=True, exist_ok=True)
        addresses = [self._address(name) for name in self.names]
        entries = "".join(f"{address} {name}\n" for address, name in zip(addresses, self.names, strict=True))
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{entries}")
        # The bridge is in a namespace of its own, so that the machine's network does not know it.
        _ip("netns", "add", self._id)
        self._in_switch("link", "add", "bridge", "type", "bridge")
        self._in_switch("link", "set", "bridge", "up")
        for name, address in zip(self.names, addresses, strict=True):
            space = self._space(name)
            _ip("netns", "add", space)
            _ip("link", "add", name, "netns", self._id, "type", "veth", "peer", "name", "eth0", "netns", space)
            self._in_switch("link", "set", name, "master", "bridge", "up")
            for arguments in (["addr", "add", f"{address}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
                _ip("-n", space, *arguments)
            _ip("-n", space, "link", "set", "lo", "up")

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
        """Starts a command on a host, this environment's (torchrun, dask) first; :meth:`log` has its output."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        with self.log_file(name).open("ab") as log:
            entering = [*self._entering(name), *command]
            self._started[name] = subprocess.Popen(entering, env={**environment, "PATH": path}, stdout=log, stderr=log)

    def _entering(self, name: str) -> list[str]:
        inside = 'mount --bind "$1" /etc/hosts; hostname "$2"; shift 2; exec "$@"'
        entering = ["ip", "netns", "exec", self._space(name), "unshare", "--uts", "--mount", "sh", "-ec", inside, "sh"]
        return [*entering, str(self._folder / "hosts"), name]

    def run(self, name: str, command: Sequence[str], environment: Mapping[str, str] = os.environ) -> str:
        """Runs a command on a host to its end; returns its output."""
        entering = [*self._entering(name), *command]
        ran = subprocess.run(entering, env=environment, check=False, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def wait(self, seconds: float, names: Sequence[str] = ()) -> dict[str, int]:
        """Waits for the last command of every host, or of these; returns their exit codes."""
        end = time.monotonic() + seconds
        return {name: self._started[name].wait(max(0.0, end - time.monotonic())) for name in names or self._started}

    def log_file(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def log(self, name: str) -> str:
        return self.log_file(name).read_text(errors="replace") if self.log_file(name).exists() else ""

    def processes(self, name: str) -> list[psutil.Process]:
        found = subprocess.run(
            ["ip", "netns", "pids", self._space(name)], check=True, capture_output=True, text=True
        ).stdout.split()
        return [psutil.Process(int(each)) for each in found if psutil.pid_exists(int(each))]

    def send(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to every process of a host: SIGKILL ends it, SIGSTOP freezes it, SIGCONT resumes it."""
        for each in self.processes(name):
            each.send_signal(number)

    def crash(self, name: str) -> None:
        """Ends a host as a power failure does: its link is down before its processes end, so that nothing is sent."""
        self.cut(name)
        self.send(name, signal.SIGKILL)

    def cut(self, name: str) -> None:
        """Takes the link of a host down."""
        self._in_switch("link", "set", name, "down")

    def mend(self, name: str) -> None:
        """Takes the link of a host up again."""
        self._in_switch("link", "set", name, "up")

    def block(self, name: str, other: str) -> None:
        """Loses what a host sends to another; its other connections work."""
        nobody = ["lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent"]
        _ip("-n", self._space(name), "neigh", "replace", self._address(other), *nobody)

    def unblock(self, name: str, other: str) -> None:
        _ip("-n", self._space(name), "neigh", "del", self._address(other), "dev", "eth0")

    def close(self) -> None:
        for name in self.names:
            self.send(name, signal.SIGCONT)
            self.send(name, signal.SIGKILL)
        for each in self._started.values():
            each.wait()
        for space in [*map(self._space, self.names), self._id]:
            _ip("netns", "del", space)

    def _address(self, name: str) -> str:
        return f"10.77.0.{self.names.index(name) + 1}"

    def _space(self, name: str) -> str:
        return f"{self._id}-{name}"

    def _in_switch(self, *arguments: str) -> None:
        _ip("-n", self._id, *arguments)


def missing() -> str:
    """Why hosts cannot be made here; empty if they can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    absent = [each for each in ("ip", "unshare") if not shutil.which(each)]
    if absent:
        return f"needs {', '.join(absent)} (iproute2, util-linux)"
    made = subprocess.run(["ip", "netns", "add", f"c{os.getpid()}"], check=False, capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    _ip("netns", "del", f"c{os.getpid()}")
    return ""


@contextmanager
def hosts(count: int, folder: Path) -> Iterator[Hosts]:
    """Makes hosts; skips the test where that is not possible."""
    if why := missing():
        pytest.skip(why)
    made = Hosts(count, folder)
    try:
        yield made
    finally:
        made.close()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
