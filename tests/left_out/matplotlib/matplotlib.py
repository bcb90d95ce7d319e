"""In the place of a package that a test leaves out (tests/left_out): it cannot be imported."""

raise ImportError("matplotlib is left out of this test")
