"""Configuration, sharded models, training, checkpoints, publishing, serving and the command line.

The names below are the interface for Python; each is what the command of its name does. They are imported on first use
and print only warnings; ``show_log()`` shows what commands show. ``cowrec.data_pipeline.prepare`` makes data sets.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .runtime.environment import quiet_libraries

if TYPE_CHECKING:
    from .config.run import RunConfig, load_config, save_config
    from .export.export import export_run as export_model
    from .runtime.environment import __version__, show_log
    from .training.fit import FittedModel, fit, load
    from .training.saved_run import evaluate_run as evaluate
    from .training.saved_run import predict_run as predict
    from .training.trainer import train

_ORIGIN = {
    "FittedModel": ".training.fit",
    "RunConfig": ".config.run",
    "__version__": ".runtime.environment",
    "evaluate": ".training.saved_run:evaluate_run",
    "export_model": ".export.export:export_run",
    "fit": ".training.fit",
    "load": ".training.fit",
    "load_config": ".config.run",
    "predict": ".training.saved_run:predict_run",
    "save_config": ".config.run",
    "show_log": ".runtime.environment",
    "train": ".training.trainer",
}

__all__ = [
    "FittedModel",
    "RunConfig",
    "__version__",
    "evaluate",
    "export_model",
    "fit",
    "load",
    "load_config",
    "predict",
    "save_config",
    "show_log",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _ORIGIN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, original = _ORIGIN[name].partition(":")
    with quiet_libraries():
        return getattr(import_module(module, __name__), original or name)


def __dir__() -> list[str]:
    return __all__
