"""What happened, written down: flight records."""
