"""What this host tells of itself: processes, CPUs, clocks, and what its kernel or cluster does differently.

Below the launcher, the metrics and the engine alike; it knows none of them.
"""
