"""EmbeddingAdam: the published algorithm on sharded tables, replayed for absent rows."""

from .. import tbe  # noqa: F401 (checks the versions before the modules here import torchrec)
