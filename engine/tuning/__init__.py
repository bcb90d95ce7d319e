"""Tuning while training, on rank 0: steps are measured, and knobs turned, as the tuner's process proposes."""
