"""Worker processes of a rank, started in any way, may ask who it is."""

from __future__ import annotations

from ..ranks import run_ranks
from . import worker_programs


def test_workers_of_every_start_method_know_whose_they_are() -> None:
    for rank, found in enumerate(run_ranks(2, worker_programs.workers).values):
        for method in ("fork", "spawn", "forkserver"):
            assert found[method] == (rank, 2, rank, 2, False), (method, found)
        assert found["total"] == 2
        if rank == 0:
            said = found["alone"].stdout
            assert "NotInitializedError" in said and "no launcher's variables" in said, found["alone"]
