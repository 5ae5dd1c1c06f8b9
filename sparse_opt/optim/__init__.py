"""EmbeddingAdam: the paper's algorithm on sharded tables, with replay for absent rows."""

from .. import tbe  # noqa: F401 (checks the versions before the modules here import torchrec)
