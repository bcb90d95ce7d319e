"""Collectives of tensors and objects, on the engine of a process set."""
