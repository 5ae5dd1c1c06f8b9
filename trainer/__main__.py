"""``python -m cowrec.trainer``: the command line, in the form that torchrun launches."""

from .cli.main import main

main()
