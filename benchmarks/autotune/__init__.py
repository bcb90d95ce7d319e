"""Comparison of the tuner with other policies, on surfaces whose best setting is known."""
