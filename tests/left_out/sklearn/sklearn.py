"""In the place of a package that a test leaves out (tests/left_out): it cannot be imported."""

raise ImportError("sklearn is left out of this test")
