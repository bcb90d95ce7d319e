"""Facts about this host: processes, CPUs, clocks, and peculiarities of its kernel or cluster.

Below the launcher, the metrics and the engine alike; it knows none of them.
"""
