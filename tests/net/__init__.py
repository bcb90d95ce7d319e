"""Authenticated streams and the event loop."""
