"""What this process uses from one moment to the next: time, CPU time, memory, bytes written."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def metered() -> Iterator[dict[str, float]]:
    """Yields a dictionary that has, after the block: seconds, cpu_seconds of all threads and of the kernel for them,
    user_seconds, peak_mb (most resident memory within the block) and written_mb (to disks and caches of files)."""
    found: dict[str, float] = {}
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak
    started, used, written = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF), _of("io", "wchar")
    yield found
    now = resource.getrusage(resource.RUSAGE_SELF)
    user, system = now.ru_utime - used.ru_utime, now.ru_stime - used.ru_stime
    found |= {"seconds": time.perf_counter() - started, "cpu_seconds": user + system, "user_seconds": user}
    found |= {"peak_mb": _of("status", "VmHWM") * 1024 / 1e6, "written_mb": (_of("io", "wchar") - written) / 1e6}


def resident_mb() -> float:
    """Resident memory of this process."""
    return _of("status", "VmRSS") * 1024 / 1e6


def _of(file: str, name: str) -> int:
    lines = Path(f"/proc/self/{file}").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))
