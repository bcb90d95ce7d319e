"""Tests of the bindings, on 1 to 4 ranks."""
