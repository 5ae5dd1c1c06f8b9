"""A cowrec process: its versions and hardware, environment variables that libraries read when loaded, and its log.

As a library cowrec logs to the logger ``cowrec`` and shows nothing but warnings. Commands show it on standard error.
"""

import json
import logging
import os
import platform
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tqdm import tqdm

from cowrec.sparse_opt.versions import require_matched_set
from cowrec.urls import without_credentials

if TYPE_CHECKING:
    import torch

try:
    __version__ = version("cowrec")
except PackageNotFoundError:  # the source is on PYTHONPATH, not installed
    __version__ = "unknown"

logger = logging.getLogger("cowrec")

_ON_GPUS = "Synchronization debug mode is a prototype|TBE B200 optimization|barrier.*: using the device"
"""What torch and FBGEMM say on GPUs of settings that are meant."""
_TIME_FORM = "%Y-%m-%d %H:%M:%S"
_URL = re.compile(r"\w+://\S+")

PROCESS_SETTINGS = {
    # torch: allocate large tensors in huge pages, if the system leaves that to programs. Random lookups in large tables
    # then cost fewer page walks.
    "THP_MEM_ALLOC_ENABLE": "1",
    # OpenMP: idle threads of torch otherwise spin for milliseconds on cores that the threads of the row kernels need.
    # This count is about the pause between two operators.
    "GOMP_SPINCOUNT": "10000",
    # torch's profiler: a level above the highest one, which silences its start messages.
    "KINETO_LOG_LEVEL": "6",
}
"""Environment variables that a cowrec process sets, unless the user has set them."""
_TRACER = logging.getLogger("torch.fx._symbolic_trace")


def prepare_process() -> None:
    """Checks versions, sets :data:`PROCESS_SETTINGS`, shows the log of cowrec and hides libraries' warnings.

    Entry points call it before torch is imported: torch and OpenMP read the variables when they are loaded. Raises
    ImportError if torch, fbgemm and torchrec do not match.
    """
    require_matched_set()
    show_log()
    for name, value in PROCESS_SETTINGS.items():
        os.environ.setdefault(name, value)
    _ignore_warnings()
    # fbgemm 1.6 warns about the torch that it was built for; require_matched_set checks the versions.
    logging.getLogger().addFilter(lambda record: "_fbgemm_torch_compat_table" not in record.getMessage())
    _TRACER.setLevel(logging.ERROR)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hides libraries' deprecation warnings in the block, and nothing else."""
    level = _TRACER.level
    with warnings.catch_warnings():
        _ignore_warnings()
        _TRACER.setLevel(logging.ERROR)
        try:
            yield
        finally:
            _TRACER.setLevel(level)


def _ignore_warnings() -> None:
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="torchmetrics|torchrec")
    warnings.filterwarnings("ignore", _ON_GPUS, UserWarning)


def launched_rank() -> int:
    """Returns the rank that torchrun gave this process, 0 without torchrun; known before the process joins a group."""
    return int(os.environ.get("RANK", "0"))


def launched_world_size() -> int:
    """Returns the number of processes that torchrun started, 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


class _AboveBars(logging.Handler):
    """Prints records to stderr, above progress bars. What cannot be written, as to a full disk, is lost."""

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        with suppress(OSError):  # the thread that logs would end, which may be one that nothing restarts
            tqdm.write(line, file=sys.stderr)
            sys.stderr.flush()


_HANDLER = _AboveBars()


def show_log(form: Literal["text", "json"] = "text", text: str = "%(message)s") -> None:
    """Shows what cowrec logs from now on, on standard error; credentials in addresses are hidden.

    Args:
        form: "text", or "json": an object a line with time, level, logger, message and, after an unexpected error,
            exception. The JSON log also has warnings of libraries and errors of threads.
        text: format of a line of text, as ``logging.Formatter`` takes it.
    """
    hide_log()
    _HANDLER.setFormatter(_JsonLines() if form == "json" else _Text(text, _TIME_FORM))
    logger.setLevel(logging.INFO)
    logger.addHandler(_HANDLER)
    logger.propagate = False  # a library may set up the root logger
    if form == "json":
        logging.getLogger().handlers[:] = [_HANDLER]  # a library may have set one that prints text
        logging.captureWarnings(True)
        threading.excepthook = _log_thread_error


def hide_log() -> None:
    for shown in (logger, logging.getLogger()):
        shown.removeHandler(_HANDLER)
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def log_end(level: int, text: str, error: BaseException | None = None) -> bool:
    """Logs why a command ends if its log is JSON; returns whether the caller must print the reason instead."""
    if not isinstance(_HANDLER.formatter, _JsonLines):
        return True
    logger.log(level, text, exc_info=error)
    return False


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return _without_credentials(super().format(record))


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _without_credentials(record.getMessage()),
        }
        if record.exc_info:
            line["exception"] = _without_credentials(self.formatException(record.exc_info))
        return json.dumps(line)


def _without_credentials(text: str) -> str:
    if "://" not in text:
        return text
    return _URL.sub(lambda url: without_credentials(url.group()), text)


def _log_thread_error(failed: threading.ExceptHookArgs) -> None:
    name = failed.thread.name if failed.thread else "a thread"
    logger.error("%s failed", name, exc_info=failed.exc_value)


def environment(device: "torch.device") -> dict[str, Any]:
    """Collects versions, hardware and source revision, which are stored with every measurement."""
    import torch  # after prepare_process

    return {
        "versions": {"python": platform.python_version(), **library_versions()},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "threads": torch.get_num_threads(),
        "git_commit": _git_commit(),
    }


def library_versions() -> dict[str, str]:
    """Returns the versions of cowrec and of libraries that its results depend on, as far as they are installed."""
    found = {}
    for name in ("cowrec", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "numpy", "pyarrow", "numba"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _git_commit() -> str | None:
    """Returns the commit of the running source, with "+" if files differ from it; None outside a checkout of it.

    An environment inside a user's own repository is no checkout.
    """

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", *arguments]  # whose lock would outlast a kill
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
