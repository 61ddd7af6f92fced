"""What is not part of serving: benchmarks, kernels compiled ahead of time, the trainer's side of weight transfer."""
