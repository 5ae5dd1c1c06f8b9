"""`cowrec serve`: predictions over HTTP from an exported model that follows published versions."""
