"""Processes of a run: their group, their heartbeat, and how they stop."""
