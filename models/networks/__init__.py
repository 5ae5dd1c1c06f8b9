"""The networks with one logit, each in one file, which cites its equations."""
