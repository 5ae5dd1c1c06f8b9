"""Exporting a trained model as files that predict without its training data."""
