"""What `cowrec versions` does: it lists the versions of a target, and pins the target to one of them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cowrec.data_pipeline.urls import without_credentials

from .blob import Blob, DamagedBlob, Kind, OtherFormat
from .pin import Pin, decode_pin, encode_pin
from .target import open_target
from .version_chain import chains, decode_as, read_blob


@dataclass(frozen=True)
class ListedVersion:
    """One blob of a target.

    Attributes:
        version, previous, kind, lineage, created: see :class:`Blob`.
        step, sample_time: see :class:`Change`.
        size: in bytes.
        problem: why it cannot be read; the attributes other than version, kind and size are then empty.
        pinnable: whether the target can be pinned to this version.
    """

    version: int
    kind: Kind
    size: int
    previous: int = 0
    lineage: str = ""
    created: float = 0.0
    step: int = 0
    sample_time: int | None = None
    problem: str = ""
    pinnable: bool = False


class Versions:
    """The versions of a target, and its pin.

    Args:
        url: of the target, see :func:`open_target`.

    Raises:
        ValueError: the URL is not that of a target.
    """

    def __init__(self, url: str) -> None:
        self._shown, self._target = without_credentials(url), open_target(url)

    def pin(self) -> Pin | None:
        """Reads the pin; None if there is none, or it was released. Raises DamagedBlob, OSError."""
        record = self._target.pin()
        pin = decode_pin(record) if record else None
        return pin if pin and pin.version else None

    def listed(self) -> list[ListedVersion]:
        """Reads all versions, the oldest first.

        Raises:
            ValueError: there are none.
            OSError: the target cannot be reached.
        """
        found = [each for each in (self._listed(*blob) for blob in self._blobs()) if each]
        intact = {(each.version, each.kind): each for each in found if not each.problem}
        reached = {each.version for each in found if _chain_of(found, each.version, intact)}
        return [replace(each, pinnable=each.version in reached) for each in found]

    def set_pin(self, version: int) -> Pin:
        """Pins the target to a version, which all readers go to and stay at.

        Raises:
            ValueError: the version cannot be reached; the message has those that can.
            OSError: the target cannot be reached, or is full.
        """
        for chain in chains(self._blobs(), version, self._read):
            if chain[-1].version != version:
                continue
            pin = Pin(version, chain[0].version, chain[0].lineage, time.time())
            encoded = encode_pin(pin)
            try:
                self._target.set_pin(encoded, [(each.version, each.kind) for each in chain])
            except FileNotFoundError:  # removed since it was read
                if self._target.pin() == encoded:
                    self.release_pin()
                break
            return pin
        listed = self.listed()
        can = _ranges([each.version for each in listed if each.pinnable])
        problem = next((each.problem for each in reversed(listed) if each.problem), "wait for the next full one")
        raise ValueError(
            f"version {version} of {self._shown} cannot be reached: it, or one that it is based on, is damaged or not"
            f" there; {f'choose one of {can}' if can else f'no version can be: {problem}'}"
        )

    def release_pin(self) -> None:
        """Releases the pin: readers go to the newest version.

        Raises:
            ValueError: there is nothing published.
            OSError: the target cannot be reached.
        """
        self._blobs()
        self._target.set_pin(encode_pin(Pin(0, 0, "", time.time())), [])

    def close(self) -> None:
        self._target.close()

    def _blobs(self) -> list[tuple[int, Kind]]:
        blobs = self._target.blobs()
        if not blobs:
            raise ValueError(f"{self._shown} has no version; check the path or URL, or wait for the first one")
        return blobs

    def _read(self, version: int, kind: Kind) -> Blob | None:
        try:
            return read_blob(self._target, version, kind)
        except (FileNotFoundError, DamagedBlob, OtherFormat):
            return None

    def _listed(self, version: int, kind: Kind) -> ListedVersion | None:
        try:
            content = self._target.read(version, kind)
        except FileNotFoundError:  # removed since it was listed
            return None
        try:
            blob = decode_as(version, kind, content)
        except (DamagedBlob, OtherFormat) as error:
            return ListedVersion(version, kind, len(content), problem=str(error))
        about = (blob.previous, blob.lineage, blob.created, blob.change.step, blob.change.sample_time)
        return ListedVersion(version, kind, len(content), *about)


def _chain_of(
    listed: Sequence[ListedVersion], version: int, intact: dict[tuple[int, Kind], ListedVersion]
) -> list[ListedVersion]:
    available = [(each.version, each.kind) for each in listed]
    found = chains(available, version, lambda number, kind: intact.get((number, kind)))
    return next((chain for chain in found if chain[-1].version == version), [])


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers as text: "3 to 12, 15"."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(f"{low}" if low == high else f"{low} to {high}" for low, high in ranges)
