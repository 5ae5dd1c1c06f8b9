"""Inference of a schema file from the first rows of raw files."""
