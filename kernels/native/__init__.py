"""The kernels for CPUs: C++ that is compiled on first use, and what binds it."""
