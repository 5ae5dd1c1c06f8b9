"""Lookups of sharded TorchRec models: their discovery, geometry, column shards, and state laid out like the weights."""

from cowrec.sparse_opt.versions import require_matched_set

# Before the modules here import torchrec and fbgemm, which fail with an unclear error if versions do not match.
require_matched_set()
