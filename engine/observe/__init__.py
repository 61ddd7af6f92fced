"""Metrics and traces of an engine."""
