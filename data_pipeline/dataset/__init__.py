"""The prepared data set: its schema, its Parquet shards, and the batches in memory."""
