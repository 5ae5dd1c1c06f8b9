"""The prepared data set: its schema, its Parquet shards, and its samples and batches in memory."""
