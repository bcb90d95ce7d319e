"""What data parallelism adds to a training step, beside no communication at all and beside DDP."""
