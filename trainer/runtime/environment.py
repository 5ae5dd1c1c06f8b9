"""Settings of a cowrec process: environment variables that libraries read when loaded, and filters of their output."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from cowrec.sparse_opt.versions import require_matched_set

from .console import show_log

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
