"""Machines unlike the one that the tests run on, and what takes too long for the test command (`make strange`)."""
