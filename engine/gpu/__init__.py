"""The GPU of a rank, on which collectives of CUDA tensors are to run: loaded and opened only when it is asked for."""
