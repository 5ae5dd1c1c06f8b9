"""The command ``cowrec``, and ``python -m cowrec.trainer``, its form that torchrun launches."""

import os
import sys
from contextlib import suppress
from importlib.util import find_spec
from typing import NoReturn

PACKAGES = {
    "pyarrow": "pyarrow",
    "pydantic": "pydantic",
    "safetensors": "safetensors",
    "tomli-w": "tomli_w",
    "typer": "typer",
    "tqdm": "tqdm",
    "tensorboard": "tensorboard",
    "matplotlib": "matplotlib",
    "torchmetrics": "torchmetrics",
    "tensordict": "tensordict",
    "pyre-extensions": "pyre_extensions",
}
"""Packages of the extra ``trainer``, and the modules that they install."""


def main() -> None:
    """Runs the command line; exits with 2 and a line that names the remedy if its packages are not installed."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by >&-
            null = os.open(os.devnull, os.O_WRONLY)
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, "w", encoding="utf-8"))
    absent = [package for package, module in PACKAGES.items() if find_spec(module) is None]
    if absent:
        print(
            f"cowrec: error: the command line requires {', '.join(absent)}, not installed here:"
            " pip install 'cowrec[trainer]'",
            file=sys.stderr,
        )
        sys.exit(2)
    from .cli.main import main as run

    try:
        run()
    except SystemExit as ended:
        _exit(ended.code if isinstance(ended.code, int) else int(ended.code is not None))


def _exit(code: int) -> NoReturn:
    """Ends the process at once, without Python's shutdown.

    The shutdown would wait for messages that other processes of a run will never send, and would abort the process if a
    thread of torch or of another library released a Python object meanwhile.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:  # whoever read it has read enough
            pass
        except OSError as error:
            if stream is sys.stdout:
                with suppress(OSError):
                    print(f"cowrec: error: standard output could not be written ({error})", file=sys.stderr)
                code = code or 2
    os._exit(code)


if __name__ == "__main__":
    main()
