"""Parsed columns to features: transforms of dense values, vocabularies of ids."""
