"""The kernels for x86 CPUs: C++ that is compiled on first use, and what binds it."""
