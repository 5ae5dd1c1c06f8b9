"""Lookups that are wrapped: rules and statistics of their tables, work on the rows of their batches, their backward."""

from .. import tbe  # noqa: F401 (checks the versions before the modules here import torchrec)
