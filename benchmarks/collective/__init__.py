"""Allreduce by message size, the cost of a call, and what an idle engine uses."""
