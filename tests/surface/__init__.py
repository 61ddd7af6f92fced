"""A test of every row of the public surface: `benchmarks/surface_check.py` runs them, and sees that each can fail."""
