"""GPU of a rank, for collectives of CUDA tensors: loaded and opened at its first use."""
