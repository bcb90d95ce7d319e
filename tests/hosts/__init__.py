"""Ranks on several hosts."""
