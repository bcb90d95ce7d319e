"""The GPU plane, on machines without a GPU."""
