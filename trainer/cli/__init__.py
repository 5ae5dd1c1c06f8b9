"""The command line `cowrec`."""
