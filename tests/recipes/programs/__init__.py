"""Training programs of libraries over torch.distributed, which `make recipes` compares on two backends."""
