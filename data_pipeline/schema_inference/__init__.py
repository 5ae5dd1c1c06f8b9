"""A schema file written from a sample of raw data."""
