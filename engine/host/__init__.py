"""Facts about this host: processes, CPUs, clocks, and peculiarities of its kernel.

The launcher, the metrics and the engine build on it; it depends on none of them.
"""
