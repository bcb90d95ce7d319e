"""Competing load: one computing process bound to each processor."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

from benchmarks.common import paths


@contextlib.contextmanager
def keep_busy(processors: Sequence[int]) -> Iterator[None]:
    """Keep every processor computing while the block runs."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for processor in processors:
            command = [sys.executable, "-m", "benchmarks.common.neighbours", str(processor), str(os.getpid())]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            process = subprocess.Popen(
                command, env=environment, cwd=paths.ROOT, stdout=subprocess.PIPE, start_new_session=True
            )
            started.append(process)
            assert process.stdout is not None
            process.stdout.readline()  # it computes from now on
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _compute_forever(processor: int, parent: int) -> None:
    import numpy as np

    os.sched_setaffinity(0, {processor})
    a = np.random.default_rng(0).random((256, 256), dtype=np.float32)
    print("computing", flush=True)
    while os.getppid() == parent:
        np.tanh(a @ a)


if __name__ == "__main__":
    _compute_forever(int(sys.argv[1]), int(sys.argv[2]))
