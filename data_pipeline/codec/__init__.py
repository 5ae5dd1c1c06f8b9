"""Raw samples, as JSON or Arrow, to the features of a prepared data set."""
