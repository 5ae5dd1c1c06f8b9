"""Mapping of raw 64-bit ids to rows of embedding tables without collisions: admission, expiry, eviction."""
