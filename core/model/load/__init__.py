"""Reads a checkpoint into a model of transformers."""
