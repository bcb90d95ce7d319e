"""Tuning during training, on rank 0: knobs take values that the tuner's process proposes, and steps are measured."""
