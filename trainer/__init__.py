"""Configuration, assembly, the training loop, evaluation, checkpoints and the command line."""

import os

# Read by torch when it makes its first tensor: large ones lie in huge pages then, where the system leaves that to
# programs. Rows that are looked up here and there in large tables cost fewer page walks.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# Read by OpenMP when torch is loaded: its idle threads otherwise spin for milliseconds on the cores that the threads of
# the row kernels want. So many turns are about the pause between two operators.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from cowrec.sparse_opt.versions import require_matched_set

PROCESS_SETTINGS = ("THP_MEM_ALLOC_ENABLE", "GOMP_SPINCOUNT")
"""Environment variables that a training process has set for itself, unless its user had."""

require_matched_set()
