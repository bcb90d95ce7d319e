"""Tests that examples, README, recipes and benchmarks do what they say."""
