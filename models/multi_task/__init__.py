"""Networks with a logit for each of several tasks, which share embeddings and layers."""
