"""A cowrec process: its version, environment variables that libraries read when loaded, and its log.

As a library cowrec logs to the logger ``cowrec`` and shows nothing but warnings. Commands show lines on standard error,
or for months write text or JSON lines to files of a limited size.
"""

import json
import logging
import logging.handlers
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from cowrec.sparse_opt.versions import require_matched_set

try:
    __version__ = version("cowrec")
except PackageNotFoundError:  # the source is on PYTHONPATH, not installed
    __version__ = "unknown"

logger = logging.getLogger("cowrec")

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

    Entry points call it before torch is imported: the variables are read when torch and OpenMP are loaded.

    Raises:
        ImportError: torch, fbgemm and torchrec do not match.
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


def launched_rank() -> int:
    """The rank that torchrun gave this process, 0 without torchrun; known before the process joins a group."""
    return int(os.environ.get("RANK", "0"))


def launched_world_size() -> int:
    """The number of processes that torchrun started, 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


class _AboveBars(logging.Handler):
    """Prints records to stderr, above progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)
        sys.stderr.flush()


_HANDLER = _AboveBars()
_shown: list[logging.Handler] = []
_opened: list["LogSettings"] = []


def show_log() -> None:
    """Shows what cowrec logs, from now on."""
    _show(logging.Formatter("%(message)s"), _HANDLER)


def hide_log() -> None:
    """Ends :func:`show_log` and :func:`open_log`."""
    for handler in _shown:
        logger.removeHandler(handler)
        logging.getLogger().removeHandler(handler)
        handler.close()
    _shown.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def _show(formatter: logging.Formatter, handler: logging.Handler, *, libraries: bool = False) -> None:
    """Shows what cowrec logs, and if asked the warnings of libraries, in place of what an earlier call has set up."""
    hide_log()
    handler.setFormatter(formatter)
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    logger.propagate = False  # a library may set up the root logger
    if libraries:
        logging.getLogger().addHandler(handler)
    _shown.append(handler)


@dataclass(frozen=True)
class LogSettings:
    """Where a log goes and in which form.

    Attributes:
        form: "text", or "json": an object per line with time, level, logger, message and, after an error that was not
            expected, exception.
        file: instead of standard error; processes after the first add their rank to its name.
        max_bytes: size at which the file is renamed to FILE.1, and the earlier one to FILE.2; 0: never, so that another
            program may rename it.
        backups: number of renamed files to keep.
    """

    form: Literal["text", "json"] = "text"
    file: Path | None = None
    max_bytes: int = 100 << 20
    backups: int = 5

    def __post_init__(self) -> None:
        for flag, value, least in (("max-bytes", self.max_bytes, 0), ("backups", self.backups, 1)):
            if value < least:
                raise ValueError(f"--log-{flag} must be at least {least}, got {value}")


def open_log(settings: LogSettings, text: str = "%(message)s") -> None:
    """Logs as the settings say from now on; as JSON or to a file also warnings of libraries and errors of threads.

    Credentials in addresses are hidden.

    Args:
        text: form of a line of text, as of ``logging.Formatter``; lines of files begin with the time in any case.

    Raises:
        OSError: the file cannot be written.
    """
    if settings.file:
        text = text if "asctime" in text else f"%(asctime)s {text}"
    formatter = _JsonLines() if settings.form == "json" else _Text(text, _TIME_FORM)
    owns_process = settings.form == "json" or settings.file is not None
    if owns_process:
        logging.getLogger().handlers.clear()  # a library may have set one that prints text
        logging.captureWarnings(True)
        threading.excepthook = _log_thread_error
    handler = _files(settings, settings.file) if settings.file else _HANDLER
    _show(formatter, handler, libraries=owns_process)
    _opened[:] = [settings]


def log_end(level: int, text: str, error: BaseException | None = None) -> bool:
    """Logs why a command ends, unless its log is text on standard error; returns whether it is to be printed there."""
    if not _opened or (_opened[0].form == "text" and not _opened[0].file):
        return True
    logger.log(level, text, exc_info=error)
    return _opened[0].file is not None


def _files(settings: LogSettings, file: Path) -> logging.Handler:
    rank = launched_rank()
    path = file.with_name(f"{file.stem}.rank{rank}{file.suffix}") if rank else file
    path.parent.mkdir(parents=True, exist_ok=True)
    if not settings.max_bytes:
        return logging.handlers.WatchedFileHandler(path, encoding="utf-8", errors="backslashreplace")
    return logging.handlers.RotatingFileHandler(
        path, maxBytes=settings.max_bytes, backupCount=settings.backups, encoding="utf-8", errors="backslashreplace"
    )


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
    from cowrec.data_pipeline.urls import without_credentials  # loads torch, which a prepared process may only do

    return _URL.sub(lambda url: without_credentials(url.group()), text)


def _log_thread_error(failed: threading.ExceptHookArgs) -> None:
    name = failed.thread.name if failed.thread else "a thread"
    logger.error("%s failed", name, exc_info=failed.exc_value)
