"""Tests of the tuner: its policy, on simulated surfaces too, and its search in real jobs."""
