"""Malformed samples of a stream: how many are too many, and the file that keeps them."""

import json
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from cowrec.errors import UserError
from cowrec.files import append_line

from ..codec import BadSample
from ..raw.json_lines import MAX_BYTES
from .source import Chunk

RECENT = 1000
"""Fewest samples over which a share is judged, so that a few malformed ones in a row are not too many."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MalformedPolicy:
    """What becomes of malformed samples.

    Attributes:
        max_share: largest share of malformed samples among the last `RECENT` and those that arrive; 1: any.
        action: beyond that, "wait", which takes no further sample and asks again every few seconds, or "stop".
        path: file that keeps malformed samples; None: none.
        max_bytes: size at which the file is renamed to NAME.1, in place of the one before; 0: no limit.
    """

    max_share: float = 1.0
    action: Literal["wait", "stop"] = "wait"
    path: Path | None = None
    max_bytes: int = 64 << 20


class MalformedSamples:
    """Judges and keeps the malformed samples of a stream by a policy; `waits` is True while too many are malformed."""

    def __init__(self, policy: MalformedPolicy) -> None:
        self._policy, self.waits = policy, False
        self._recent: deque[tuple[int, int]] = deque()  # samples of the last chunks, and how many were malformed
        self._fails = False

    def accept(self, samples: int, bad: Sequence[BadSample]) -> bool:
        """Returns whether a chunk's samples may be taken, of which some are bad. Raises UserError if the run ends."""
        policy = self._policy
        arrived = samples + sum(each for each, _ in self._recent)
        malformed = len(bad) + sum(each for _, each in self._recent)
        if bad and arrived >= RECENT and malformed > policy.max_share * arrived:
            message = (
                f"{malformed:,} of the last {arrived:,} samples are malformed, more than online.max_malformed_share ="
                f" {policy.max_share:g}: {bad[0].reason}. Correct what writes them, or raise the share"
            )
            if policy.action == "stop":
                raise UserError(message)
            if not self.waits:
                logger.warning("%s; no further sample is taken until then", message)
            self.waits = True
            return False
        self.waits = False
        self._recent.append((samples, len(bad)))
        while arrived - self._recent[0][0] >= RECENT:
            arrived -= self._recent.popleft()[0]
        return True

    def keep(self, chunk: Chunk, bad: Sequence[BadSample]) -> None:
        """Writes bad samples as JSON objects, with the reason as `malformed`; `prepare` reads the file.

        A sample that is no object becomes the value `text`. If the disk is full, samples are left out with one warning.
        """
        path = self._policy.path
        if path is None:
            return
        try:
            for each in bad:
                line = _line(_sample(chunk, each.index), each.reason)
                append_line(path, line, self._policy.max_bytes)
                self._fails = False
        except OSError as error:
            if not self._fails:
                logger.warning("malformed samples are not kept: %s", error)
            self._fails = True


def _sample(chunk: Chunk, index: int) -> Any:
    """A sample as the value of its JSON, or as text if it cannot be read."""
    try:
        if isinstance(chunk.samples, pa.Table):
            return chunk.samples.slice(index, 1).to_pylist()[0]
        return json.loads(chunk.samples[index]) if len(chunk.samples[index]) <= MAX_BYTES else None
    except (ValueError, OverflowError, RecursionError, pa.ArrowException):
        samples = chunk.samples
        return None if isinstance(samples, pa.Table) else samples[index].decode(errors="replace")


def _line(sample: Any, reason: str) -> bytes:
    content = sample if isinstance(sample, dict) else {"text": sample}
    return json.dumps({**content, "malformed": reason}, default=str).encode() + b"\n"
