"""Cost of data parallelism in a training step, beside no communication and beside DDP."""
