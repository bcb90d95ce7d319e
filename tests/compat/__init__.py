"""Horovod's module names over ours, and what its scripts rely on."""
