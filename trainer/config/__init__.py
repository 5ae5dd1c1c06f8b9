"""The configuration of a run: one TOML file as frozen dataclasses."""
