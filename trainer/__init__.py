"""Configuration, assembly, the training loop, evaluation, checkpoints and the command line."""

from cowrec.sparse_opt.versions import require_matched_set

require_matched_set()
