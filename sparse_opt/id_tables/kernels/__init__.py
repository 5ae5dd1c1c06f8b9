"""Compiled kernels of the id tables and the memory that they work on."""
