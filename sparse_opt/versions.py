"""Matched sets of torch, fbgemm and torchrec, and the check that the installed packages are such a set.

fbgemm 1.X is built for torch 2.(X+5), and torchrec 1.X for fbgemm 1.X. Other combinations fail at import with an
undefined symbol or a missing operator.
"""

import re
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from cowrec.errors import UserError

CPU_BUILD = "fbgemm-gpu-cpu"
CUDA_BUILD = "fbgemm-gpu"


class UnmatchedVersions(UserError, ImportError):
    """The installed torch, fbgemm and torchrec cannot be used together."""


class MatchedSet(NamedTuple):
    """Versions that work together, by their first two numbers; ``make test-matrix`` tests with these Pythons."""

    torch: str
    fbgemm: str
    torchrec: str
    pythons: str


MATCHED_SETS = (
    MatchedSet("2.14.1", "1.9.0", "1.9.2", "3.11 3.12 3.13"),
    MatchedSet("2.13.0", "1.8.0", "1.8.0", "3.12"),
    MatchedSet("2.11.0", "1.6.0", "1.6.1", "3.12"),
)
"""The tested sets, the default first and the oldest last. The Makefile reads these lines, so that each stays one line;
a test compares all other files that name versions."""
IMPORTED_BY_TORCHREC = "tensordict pyre-extensions"
"""Packages that ``import torchrec`` needs and --no-deps leaves out."""


def require_matched_set(load: Callable[[], None] | None = None) -> None:
    """Checks by their metadata that the installed torch, fbgemm and torchrec belong together.

    A set that was not tested is accepted with a warning if it follows the rule above, is not older than the tested
    sets, and ``load``, which imports what cowrec needs, succeeds. Without ``load`` it is accepted without a warning.

    Raises UnmatchedVersions, with the installed versions and the commands to run, if the packages do not belong
    together, one is missing, or ``load`` failed.
    """
    torch, torchrec = _installed("torch"), _installed("torchrec")
    builds = {name: number for name in (CPU_BUILD, CUDA_BUILD) if (number := _installed(name))}
    tested = next((matched for matched in MATCHED_SETS if _series(matched.torch) == _series(torch)), None)
    found = {"torch": torch, **(builds or {"fbgemm-gpu": ""}), "torchrec": torchrec}
    listed = ", ".join(f"{name} {number or '(not installed)'}" for name, number in found.items())
    remedy = _remedy(tested or MATCHED_SETS[0], torch, torchrec, builds)
    if _by_rule(torch) != [*map(_series, found.values())] or (torch.endswith("+cpu") and CUDA_BUILD in builds):
        raise UnmatchedVersions(
            f"cowrec needs torch, fbgemm and torchrec of one matched set, found {listed}; install one with: {remedy}"
        )
    if tested or load is None:
        return
    try:
        load()
    except Exception as error:  # whatever a library raises while it is loaded
        raise UnmatchedVersions(
            f"cowrec was not tested with {listed}, and cannot use them ({error}); install a tested set with: {remedy}"
        ) from error
    warnings.warn(f"cowrec was not tested with {listed}; to install a tested set: {remedy}", stacklevel=2)


def _by_rule(torch: str) -> list[str]:
    """Series of torch, and of its fbgemm and torchrec; empty if torch is older than all tested sets."""
    minor = int(found[1]) if (found := re.match(r"2\.(\d+)", torch)) else 0
    oldest = int(_series(MATCHED_SETS[-1].torch)[2:])
    return [f"2.{minor}", f"1.{minor - 5}", f"1.{minor - 5}"] if minor >= oldest else []


def _installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _series(number: str) -> str:
    return ".".join(number.split(".")[:2])


def _remedy(wanted: MatchedSet, torch: str, torchrec: str, builds: dict[str, str]) -> str:
    """Builds the pip commands that install ``wanted``."""
    keeps_cuda_build = list(builds) == [CUDA_BUILD] and not torch.endswith("+cpu")
    build, other = (CUDA_BUILD, CPU_BUILD) if keeps_cuda_build else (CPU_BUILD, CUDA_BUILD)
    hint = "" if keeps_cuda_build else f" (on an NVIDIA GPU {CUDA_BUILD} instead of {CPU_BUILD})"
    # Both builds install the same folder: uninstalling one breaks the other, so both are uninstalled first.
    clear = f"pip uninstall -y {CPU_BUILD} {CUDA_BUILD} && " if other in builds else ""
    imported = "" if torchrec else f" {IMPORTED_BY_TORCHREC}"
    # Without --no-deps torchrec would install the CUDA build of fbgemm.
    return (
        f"{clear}pip install torch=={wanted.torch} {build}=={wanted.fbgemm}{imported} && "
        f"pip install --no-deps torchrec=={wanted.torchrec}{hint}"
    )
