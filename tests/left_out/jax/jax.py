"""Placeholder for a package that a test leaves out (tests/left_out): importing it fails."""

raise ImportError("jax is left out of this test")
