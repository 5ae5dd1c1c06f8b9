"""EmbeddingAdam: the published algorithm on sharded tables, replayed for absent rows."""
