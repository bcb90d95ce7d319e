"""One rank started by an MPI launcher: writes down its place and a sum, for each of two worlds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

import engine

from ..waiting import linger


def main(how: str = "") -> None:
    """Begin two worlds, one after the other; as `without`, without mpi4py; as `never`, rank 1 never begins."""
    if how == "without":
        sys.modules["mpi4py"] = None  # type: ignore[assignment]
    own = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
    if how == "never" and own == "1":
        linger()  # until the launcher ends it
    for world in range(2):
        try:
            engine.init()
        except engine.errors.EngineError as error:
            Path(os.environ["HERE"], f"error.{own}").write_text(f"{type(error).__name__}: {error}")
            raise
        place = engine.rank(), engine.size(), engine.local_rank(), engine.local_size(), engine.cross_rank()
        total = engine.allreduce(np.full(3, engine.rank() + 1.0), engine.Sum)
        assert engine.rank() == int(own)
        Path(os.environ["HERE"], f"told.{world}.{own}").write_text(f"{place} {total[0]:g}")
        engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
