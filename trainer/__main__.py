"""``python -m cowrec.trainer``: the command line, in the form that torchrun launches."""

from .cli import main

main()
