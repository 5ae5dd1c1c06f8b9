"""`cowrec tune`: a search for the base values at one batch size."""
