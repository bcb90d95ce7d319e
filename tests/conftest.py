"""Puts this directory on the import path: `ranks` runs programs on N ranks through the real launcher."""
