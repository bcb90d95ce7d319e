"""Stand-ins for the libraries and the processor of a GPU."""
