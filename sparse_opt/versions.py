"""Checks that torch, fbgemm and torchrec belong together, before torchrec is imported and fails in a riddle.

fbgemm and torchrec are built against one torch each; any other pairing ends in an undefined symbol or an operator that
is not there. The check reads installed metadata only, so it costs nothing and cannot fail itself.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

CPU_BUILD = "fbgemm-gpu-cpu"
CUDA_BUILD = "fbgemm-gpu"


class MatchedSet(NamedTuple):
    """Versions that work together; a release matches when its first two numbers do (2.13.0+cpu matches 2.13.0)."""

    torch: str
    fbgemm: str
    torchrec: str


MATCHED_SETS = (MatchedSet("2.13.0", "1.8.0", "1.8.0"), MatchedSet("2.11.0", "1.6.0", "1.6.1"))


def require_matched_set() -> None:
    """Returns if the installed torch, fbgemm and torchrec are one of ``MATCHED_SETS``.

    Raises:
        ImportError: they are not, or one is missing; the message says what was found and what to install.
    """
    torch, torchrec = _installed("torch"), _installed("torchrec")
    builds = {name: number for name in (CPU_BUILD, CUDA_BUILD) if (number := _installed(name))}
    wanted = next((each for each in MATCHED_SETS if _same_series(torch, each.torch)), MATCHED_SETS[0])
    fits = (
        _same_series(torch, wanted.torch)
        and _same_series(torchrec, wanted.torchrec)
        and len(builds) == 1
        and all(_same_series(number, wanted.fbgemm) for number in builds.values())
        and not (torch.endswith("+cpu") and CUDA_BUILD in builds)
    )
    if not fits:
        found = {"torch": torch, **(builds or {"fbgemm-gpu": ""}), "torchrec": torchrec}
        listed = ", ".join(f"{name} {number or '(not installed)'}" for name, number in found.items())
        raise ImportError(
            "cowrec needs torch, fbgemm and torchrec of one matched set, "
            f"found {listed}; install one with: {_remedy(wanted, torch, builds)}"
        )


def _installed(distribution: str) -> str:
    """Its version, or the empty string where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _same_series(found: str, wanted: str) -> bool:
    return found.split(".")[:2] == wanted.split(".")[:2]


def _remedy(wanted: MatchedSet, torch: str, builds: dict[str, str]) -> str:
    """The pip commands that lead from what is installed to ``wanted``."""
    keeps_cuda_build = list(builds) == [CUDA_BUILD] and not torch.endswith("+cpu")
    build, other = (CUDA_BUILD, CPU_BUILD) if keeps_cuda_build else (CPU_BUILD, CUDA_BUILD)
    hint = "" if keeps_cuda_build else f" (on an NVIDIA GPU {CUDA_BUILD} instead of {CPU_BUILD})"
    # Both builds own the same folder: removing one that is unwanted breaks the other, so both go first.
    clear = f"pip uninstall -y {CPU_BUILD} {CUDA_BUILD} && " if other in builds else ""
    # Without --no-deps torchrec would bring the CUDA build of fbgemm along.
    return (
        f"{clear}pip install torch=={wanted.torch} {build}=={wanted.fbgemm} && "
        f"pip install --no-deps torchrec=={wanted.torchrec}{hint}"
    )
