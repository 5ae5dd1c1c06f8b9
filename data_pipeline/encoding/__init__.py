"""Parsed columns to features: maps of dense values, vocabularies of ids."""
