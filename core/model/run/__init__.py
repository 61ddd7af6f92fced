"""The model as the worker runs it, over the paged cache."""
