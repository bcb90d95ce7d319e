"""Tests of elastic training: pure modules against models of their surroundings, and jobs of real processes."""
