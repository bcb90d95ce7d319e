"""Names of the numbers in a page of counters, for dashboards and writers of pages, which have no page to read.

A page also contains its own names (`Snapshot.names`). A test compares these with `engine_ext.setup.codes`.
"""

from __future__ import annotations

STATES = ("new", "running", "ended", "failed", "resetting")
CAUSES = ("none", "died", "raised", "left", "stalled", "lost")
OPERATIONS = ("allreduce", "broadcast", "allgather", "barrier", "alltoall", "reducescatter")
ALGORITHMS = ("one-shot", "two-shot", "shared", "scatter", "adasum", "chain", "ring", "mpi", "device", "blocks")
REASONS = ("full", "whole_step", "awaited", "cycle_time", "frozen")  # why a batch was closed
STORES = ("cached", "streaming", "auto")
BETWEEN_HOSTS = ("auto", "direct", "chain", "ring", "mpi")
COMPRESSIONS = ("none", "fp16", "bf16", "fp8")
LATE_CAUSES = ("input", "compute", "gc", "cpu", "network", "rank")  # why a step was late
STAGES = ("queue", "pack", "nccl", "unpack", "exposed")  # stages that are timed for tensors on a GPU
PHASES = ("off", "waiting", "searching", "watching", "lost", "left", "resting")  # of the tuner

NAMES: dict[str, tuple[str, ...]] = {
    "states": STATES,
    "causes": CAUSES,
    "operations": OPERATIONS,
    "algorithms": ALGORITHMS,
    "reasons": REASONS,
    "stores": STORES,
    "between_hosts": BETWEEN_HOSTS,
    "compressions": COMPRESSIONS,
    "phases": PHASES,
    "stages": STAGES,
    "late_causes": LATE_CAUSES,
}
