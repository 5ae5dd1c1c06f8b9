"""Reading a prepared data set: shuffling, prefetching, and keeping it in memory."""
