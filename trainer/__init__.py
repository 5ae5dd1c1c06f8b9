"""Configuration, sharded models, the training loops, checkpoints, publishing, serving and the command line."""

from cowrec.sparse_opt.versions import require_matched_set

require_matched_set()
