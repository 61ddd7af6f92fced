"""Programs of the command line that are not part of serving: benchmarks, and kernels compiled ahead of time."""
