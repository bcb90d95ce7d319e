"""Tuning while training, on rank 0: measuring and turning knobs. What to try next a process of its own says."""
