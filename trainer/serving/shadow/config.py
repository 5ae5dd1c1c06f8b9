"""Settings of a shadow."""

from dataclasses import dataclass
from pathlib import Path

from cowrec.trainer.signing import SigningKey


@dataclass(frozen=True)
class ShadowConfig:
    """A shadow.

    Attributes:
        export_dir: folder of its exported model.
        follow: publication whose newest versions it applies, whatever is pinned; None for none.
        share: of the requests that it predicts, chosen by a hash of their bodies; above 0, at most 1.
        log: file of JSON lines with both predictions of each sample; None for none.
        log_bytes: that the log and the one before it may take together.
        key: that the export and the versions must be signed with; None if they are not signed.
    """

    export_dir: Path
    follow: str | None = None
    share: float = 1.0
    log: Path | None = None
    log_bytes: int = 1 << 30
    key: SigningKey | None = None

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"--shadow-share must be above 0 and at most 1, got {self.share:g}")
