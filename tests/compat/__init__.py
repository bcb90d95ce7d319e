"""Horovod's module names over the engine's, and the behaviour that its scripts rely on."""
