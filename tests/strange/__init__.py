"""Unusual machines, and checks that take too long for the test command (`make strange`)."""
