"""What the engine costs, measured beside its baselines. `python -m benchmarks --help`."""
