"""`cowrec bench`: training speed and memory in the steady state."""
