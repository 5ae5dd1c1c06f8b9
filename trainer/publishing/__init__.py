"""Publishing a model while it trains, as versions that servers follow."""
