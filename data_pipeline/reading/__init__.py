"""Reading of a prepared data set: shuffling, prefetching and resident data."""
