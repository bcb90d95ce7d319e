"""The launcher: starting ranks, showing their output, passing signals on, and reporting failures."""
