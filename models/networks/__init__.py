"""The networks, which cite their equations: made with ``(config, front)`` and sizes of their own.

``forward(dense, sparse)`` returns logits [B] of dense features [B, N] and the ids of the fields; those of several tasks
return [B, T].
"""
