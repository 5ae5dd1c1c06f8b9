"""Check that the installed torch, fbgemm and torchrec match, before torchrec is imported.

fbgemm and torchrec are each built for one torch; other combinations fail at import with an undefined symbol or a
missing operator. The check reads package metadata only.
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


_IMPORTED_BY_TORCHREC = "tensordict pyre-extensions tqdm"
"""What --no-deps leaves out and the sharding of TorchRec imports."""
MATCHED_SETS = (
    MatchedSet("2.14.1", "1.9.0", "1.9.2"),
    MatchedSet("2.13.0", "1.8.0", "1.8.0"),
    MatchedSet("2.11.0", "1.6.0", "1.6.1"),
)


def require_matched_set() -> None:
    """Checks that the installed torch, fbgemm and torchrec are one of ``MATCHED_SETS``.

    Raises:
        ImportError: they are not, or one is missing; the message names the versions found and the commands to run.
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
            f"found {listed}; install one with: {_remedy(wanted, torch, torchrec, builds)}"
        )


def _installed(distribution: str) -> str:
    """Version of a distribution; empty if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _same_series(found: str, wanted: str) -> bool:
    return found.split(".")[:2] == wanted.split(".")[:2]


def _remedy(wanted: MatchedSet, torch: str, torchrec: str, builds: dict[str, str]) -> str:
    """Builds the pip commands that install ``wanted``."""
    keeps_cuda_build = list(builds) == [CUDA_BUILD] and not torch.endswith("+cpu")
    build, other = (CUDA_BUILD, CPU_BUILD) if keeps_cuda_build else (CPU_BUILD, CUDA_BUILD)
    hint = "" if keeps_cuda_build else f" (on an NVIDIA GPU {CUDA_BUILD} instead of {CPU_BUILD})"
    # Both builds install the same folder: uninstalling one breaks the other, so both are uninstalled first.
    clear = f"pip uninstall -y {CPU_BUILD} {CUDA_BUILD} && " if other in builds else ""
    imported = "" if torchrec else f" {_IMPORTED_BY_TORCHREC}"
    # Without --no-deps torchrec would install the CUDA build of fbgemm.
    return (
        f"{clear}pip install torch=={wanted.torch} {build}=={wanted.fbgemm}{imported} && "
        f"pip install --no-deps torchrec=={wanted.torchrec}{hint}"
    )
