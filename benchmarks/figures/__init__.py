"""Figures of the pages, drawn from recorded runs: `python -m benchmarks draw`."""
