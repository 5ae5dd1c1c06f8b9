"""The log of a command that runs for months: text or JSON lines, to standard error or to files of a limited size."""

import json
import logging
import logging.handlers
import re
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from .console import TIME_FORM, show_lines
from .environment import launched_rank

logger = logging.getLogger("cowrec")

_URL = re.compile(r"\w+://\S+")
_opened: list["LogSettings"] = []


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
        settings: of the log.
        text: form of a line of text, as of ``logging.Formatter``; lines of files begin with the time in any case.

    Raises:
        OSError: the file cannot be written.
    """
    if settings.file:
        text = text if "asctime" in text else f"%(asctime)s {text}"
    formatter = _JsonLines() if settings.form == "json" else _Text(text, TIME_FORM)
    owns_process = settings.form == "json" or settings.file is not None
    if owns_process:
        logging.getLogger().handlers.clear()  # a library may have set one that prints text
        logging.captureWarnings(True)
        threading.excepthook = _log_thread_error
    if settings.file:
        show_lines(formatter, _files(settings, settings.file), libraries=True)
    else:
        show_lines(formatter, libraries=owns_process)
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
