"""What happened, written down: timelines, flight records, and `python -m engine.trace` to read them."""
