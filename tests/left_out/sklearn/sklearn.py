"""Placeholder for a package that a test leaves out (tests/left_out): importing it fails."""

raise ImportError("sklearn is left out of this test")
