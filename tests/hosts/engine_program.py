"""One rank of a whole engine on several hosts: prints its place and its results as JSON, one line for each world."""

from __future__ import annotations

import json
import os
import re
import urllib.request

import numpy as np

import engine
from engine_ext.setup import segment_info


def main() -> None:
    """Begin two worlds, one after the other."""
    print(os.getpid(), flush=True)
    for _ in range(2):
        engine.init(metrics_port=9400)
        place = engine.rank(), engine.local_rank(), engine.local_size(), engine.cross_rank(), engine.cross_size()
        total = engine.allreduce(np.arange(1000.0) * (engine.rank() + 1), engine.Sum)
        assert np.array_equal(total, np.arange(1000.0) * sum(range(1, engine.size() + 1)))
        shown = []
        if engine.local_rank() == 0:
            with urllib.request.urlopen("http://127.0.0.1:9400/metrics", timeout=30) as answer:
                text = answer.read().decode()
            shown = sorted(int(rank) for rank in re.findall(r'^engine_rank_info\{.*\brank="(\d+)"', text, re.MULTILINE))
        engine.barrier()
        kernels = segment_info()["kernels"]
        told = {"place": place, "homogeneous": engine.is_homogeneous(), "shown": shown, "kernels": kernels}
        print(json.dumps(told), flush=True)
        engine.shutdown()


if __name__ == "__main__":
    main()
