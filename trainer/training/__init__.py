"""Training on a prepared data set, evaluation, and the use of saved runs."""
