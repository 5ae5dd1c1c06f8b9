"""Synthetic click data whose true probabilities are known."""
