"""Streams of samples: sources, sinks, order by time, the journal, and positions to resume from."""
