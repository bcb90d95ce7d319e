"""Texts for people, limits for texts from elsewhere, and the logger: imports nothing of the other packages."""
