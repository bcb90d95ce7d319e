"""Facts about a job for the tuner.

They are its identity, by which earlier results are found: the tensors that it reduces in a step, and its resources. And
they are recent batches with their spread over a step, for the model of the transport.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .. import __version__

SELDOM = 8  # a tensor reduced less than once in this many steps is not part of a step: a logged average, a check
UNNAMED = re.compile(r"[a-z]+\.noname\.\d+")  # one of 256 names that unnamed operations take in turn
DIGITS = 16  # hexadecimal digits of a signature


def describe_job(
    reduced: Mapping[str, Any], crews: Sequence[int], cpus: int, held: Mapping[str, Any]
) -> dict[str, Any]:
    """Return everything that a job's best knobs depend on, for the tuner.

    `reduced` is a result of `describe_model`, `crews` has the number of ranks of each host, and `held` are knobs that
    are not tuned. `cpus` is the number of CPUs on which the ranks of rank 0's host may run. The result's `transport`
    contains the ranks per host, because results of one layout are never used for another.
    """
    transport = "shm" if len(crews) == 1 else "tcp " + "+".join(map(str, crews))
    where = {"ranks": sum(crews), "hosts": len(crews), "transport": transport, "cpus": cpus}
    return {**reduced, **where, "version": __version__, "held": dict(held)}


def describe_model(definitions: Iterable[Mapping[str, Any]], steps: int) -> dict[str, Any] | None:
    """Describe the tensors that a job reduces in a step, regardless of their names, order, scales and ranks.

    `definitions` come from `core.Engine.definitions`; `steps` is the number of steps that have ended so far. The
    result's `model` is a digest of the kind, operation, dtype, shape and compression of each tensor or group. Its
    `tensors` is their number, and `bytes` their size, uncompressed and without sparse ones. It is None if a step
    reduces nothing that has a name.
    """
    reduced = [
        each
        for each in definitions
        if each["op"] is not None and each["times"] * SELDOM >= max(steps, 1) and not UNNAMED.fullmatch(each["name"])
    ]
    if not reduced:
        return None
    of_each = ("kind", "op", "dtype", "tensors", "sparse", "wire", "dims")
    lines = sorted(repr(tuple(each[field] for field in of_each)) for each in reduced)
    return {
        "model": hashlib.sha256("\n".join(lines).encode()).hexdigest()[:DIGITS],
        "tensors": sum(each["tensors"] for each in reduced),
        "bytes": sum(each["bytes"] for each in reduced),
    }


def summarize_traffic(history: Iterable[Mapping[str, Any]], ends: Sequence[float]) -> dict[str, Any]:
    """Return sizes and times of recent batches, and the spread of batches over a step.

    `history` comes from `core.Engine.history`. `ends` are the times at which steps ended, in seconds of the same clock,
    ascending. The result's `batches` are bytes and seconds of each allreduce. Its `arriving` is the time in seconds
    from the start of a step's first batch to the start of its last. This is the median over steps; None if no step had
    more than one batch.
    """
    rows = [
        row
        for row in history
        if row["type"] == "batch" and row["kind"] == "allreduce" and row["ended"] is not None and row["bytes"]
    ]
    spans = []
    for begin, end in itertools.pairwise(ends):
        started = [row["started"] for row in rows if begin < row["started"] <= end]
        if len(started) > 1:
            spans.append(max(started) - min(started))
    return {
        "batches": [[row["bytes"], row["ended"] - row["started"]] for row in rows],
        "arriving": statistics.median(spans) if spans else None,
    }
