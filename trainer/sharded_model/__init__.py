"""The sharded model with its optimizers, built from a schema and a configuration."""
