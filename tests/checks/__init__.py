"""Linters, type checkers and rules about the sources, as tests."""
