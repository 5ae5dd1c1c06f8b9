"""Compiled kernels of the id tables, and their memory."""
