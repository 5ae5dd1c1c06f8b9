"""Plan of a run on a cluster: memory, traffic and time of every rank, before a machine is rented."""
