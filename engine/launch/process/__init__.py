"""Processes on this host: how ranks are planned, started, watched and ended, and where their output goes."""
