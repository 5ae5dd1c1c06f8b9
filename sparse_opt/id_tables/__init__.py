"""Raw 64-bit ids to rows of embedding tables: admission, expiry, eviction, without collisions."""
