"""The process of a command and those of a run: settings and log, their group, how they stop, calls in others."""
