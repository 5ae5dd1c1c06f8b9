"""The version of cowrec."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("cowrec")
except PackageNotFoundError:  # the source is on PYTHONPATH, not installed
    __version__ = "unknown"
