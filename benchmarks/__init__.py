"""Measurements of the engine beside its baselines: `python -m benchmarks --help`."""
