"""Comparison of the simulator of `enginerun foresee` with scaling efficiencies that others have published."""
