"""Rows of a served model by field and id: stores, lookups, and changes."""
