"""Synthetic click data with known true probabilities."""
