"""FBGEMM lookups (TBEs) of a TorchRec model: finding them, their sharded state, norms over column shards."""
