"""What a run measures: the quality of predictions, by groups of samples too, and the effect of the clip."""
