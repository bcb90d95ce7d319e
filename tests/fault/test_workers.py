"""Worker processes of a rank, however they are started, can ask which rank it is."""

from __future__ import annotations

import pytest

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


UNGUARDED = """
    import multiprocessing, subprocess, sys
    import numpy as np
    import engine

    engine.init()

    def work(number):
        return number, engine.rank(), engine.size(), engine.is_initialized()

    def fail(call):
        try:
            return call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def start_again(_):
        return fail(engine.init), fail(engine.barrier)

    if __name__ == "__main__":
        for method in ("spawn", "forkserver"):
            with multiprocessing.get_context(method).Pool(2) as pool:
                print(method, pool.map(work, [1, 2]) == [(n, engine.rank(), engine.size(), False) for n in (1, 2)])
                print(*pool.map(start_again, [0])[0], sep="\\n")
        again = subprocess.run([sys.executable, "-c", "import engine; engine.init()"], capture_output=True, text=True)
        print("subprocess", again.returncode, again.stderr.splitlines()[-1])
        print("total", engine.allreduce(np.ones(1), op=engine.Sum)[0])
"""


@pytest.mark.slow
def test_workers_that_import_a_script_with_init_at_its_top_form_no_world() -> None:
    for rank, said in enumerate(run_ranks(2, UNGUARDED).ranks):
        lines = said.stdout.splitlines()
        assert {"spawn True", "forkserver True", "total 2.0"} <= {*lines}, said
        refused = [line for line in lines if f"is rank {rank} of 2 itself" in line]
        assert len(refused) == 3 and all('if __name__ == "__main__":' in line for line in refused), said
        barred = [line for line in lines if line.startswith("NotInitializedError")]
        assert len(barred) == 2 and all('if __name__ == "__main__":' in line for line in barred), said
        assert any(line.startswith("subprocess 1 ") for line in lines), said
