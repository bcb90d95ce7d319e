"""The simulator of `enginerun foresee` beside scaling efficiencies that others have published."""
