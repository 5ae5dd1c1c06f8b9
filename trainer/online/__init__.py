"""Training on a stream of samples as they arrive."""
