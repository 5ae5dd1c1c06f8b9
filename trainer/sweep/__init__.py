"""`cowrec sweep`: one configuration over a grid of batch sizes, scaling rules and seeds."""
