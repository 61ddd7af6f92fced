"""Learns from the model's own calls what it computes, fuses it and verifies the result."""
