"""The identity of a job, by which results are found again: what it reduces in a step, and how it runs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .. import __version__

SELDOM = 8  # a tensor reduced in less than one of so many steps is no part of a step: a logged average, a check
UNNAMED = re.compile(r"[a-z]+\.noname\.\d+")  # one of 256 names that operations without a name take in turn
DIGITS = 16  # hexadecimal digits of a signature


def job(reduced: Mapping[str, Any], crews: Sequence[int], cpus: int, held: Mapping[str, Any]) -> dict[str, Any]:
    """All that its knobs depend on, as the tuner is told it.

    Parameters
    ----------
    reduced : mapping
        What `model` gives.
    crews : sequence of int
        How many ranks each host has.
    cpus : int
        On which the ranks of rank 0's host may run.
    held : mapping
        Knobs that are not turned.

    Returns
    -------
    dict
        Its `transport` tells how ranks lie on hosts, since what is known of one layout is never tried in another.
    """
    transport = "shm" if len(crews) == 1 else "tcp " + "+".join(map(str, crews))
    where = {"ranks": sum(crews), "hosts": len(crews), "transport": transport, "cpus": cpus}
    return {**reduced, **where, "version": __version__, "held": dict(held)}


def model(definitions: Iterable[Mapping[str, Any]], steps: int) -> dict[str, Any] | None:
    """The tensors that a job reduces in a step, whatever their names, order, scales and ranks.

    Parameters
    ----------
    definitions : iterable of dict
        The operations that `core.Engine.definitions` gives.
    steps : int
        Number of steps that have ended so far.

    Returns
    -------
    dict or None
        `model`, the signature: of each tensor or group kind, operation, dtype, shape and compression. `tensors`, how
        many they are; `bytes`, uncompressed and without sparse ones. None if a step reduces nothing that has a name.
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
