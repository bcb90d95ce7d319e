"""Records of a run: timelines, flight records, and `python -m engine.trace` to read them."""
