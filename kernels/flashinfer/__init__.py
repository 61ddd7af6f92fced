"""The kernels for NVIDIA GPUs: FlashInfer, and Triton for what it lacks."""
