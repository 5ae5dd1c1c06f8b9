"""The command ``cowrec``, and ``python -m cowrec.trainer``, its form that torchrun launches."""

import sys
from importlib.util import find_spec

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
    absent = [package for package, module in PACKAGES.items() if find_spec(module) is None]
    if absent:
        print(
            f"cowrec: error: the command line requires {', '.join(absent)}, not installed here:"
            " pip install 'cowrec[trainer]'",
            file=sys.stderr,
        )
        sys.exit(2)
    from .cli.main import main as run

    run()


if __name__ == "__main__":
    main()
