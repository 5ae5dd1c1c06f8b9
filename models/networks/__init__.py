"""The networks: classes that take ``(config, front)`` and options, and cite their equations.

``forward(dense, sparse)`` returns logits [B], or [B, T] of T tasks, of dense features [B, N] and the fields' ids.
"""
