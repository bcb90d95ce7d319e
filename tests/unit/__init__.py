"""Parts of the engine in one process."""
