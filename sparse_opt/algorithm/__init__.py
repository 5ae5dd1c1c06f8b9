"""Clip rules, Adam and scaling rules as pure functions; they need torch alone."""
