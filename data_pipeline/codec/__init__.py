"""Encoding of raw samples, given as JSON or Arrow, to the features of a prepared data set."""
