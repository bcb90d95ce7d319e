"""Measurements of allreduce by message size, of the cost of a call, and of an idle engine."""
