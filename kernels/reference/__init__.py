"""The reference kernels, in plain torch."""
