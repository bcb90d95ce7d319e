"""Rank on one host of many: a real engine whose connections to other hosts are passed as descriptors.

    python -m benchmarks.hub.rank 0 '{"size": 256, "control": 3, ...}'

Prints a line of JSON for each step: seconds of processor time of the process until the next step, and seconds from the
step's first submission to its end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np

from engine.collectives.reduce_ops import Sum
from engine.native import core

KNOBS = {
    "fusion_threshold": 64 << 20,
    "stores": "auto",
    "chunk_bytes": 512 << 10,
    "compression": "none",
    "sockets_per_lane": 1,
}
PAUSE = 1e-3  # seconds between two checks how many tensors are ready


def main() -> None:
    """Run the rank of the first argument, in the world of the second."""
    run_rank(json.loads(sys.argv[2]), int(sys.argv[1]))


def run_rank(about: dict[str, Any], rank: int) -> None:
    """Run one rank from its start to its end."""
    lanes = {int(other): [fd] for other, fd in about["lanes"][str(rank)].items()}
    trunks = {int(other): fd for other, fd in about["trunks"][str(rank)].items()}
    peers = [os.pidfd_open(os.getpid()) if about["hosts"][other] == 0 else -1 for other in range(about["size"])]
    native = core.Engine(
        rank,
        about["size"],
        os.dup(about["control"]),
        os.dup(about["arena"]),
        peers,
        knobs={**KNOBS, "cycle_time_ms": about["cycle_ms"]},
        stall_warning=0.0,
        stall_limit=60.0,
        spin_us=0.0,
        calls=1000 + rank,
        hosts=tuple(about["hosts"]),
        lanes=lanes,
        trunks=trunks,
    )
    tensors = [np.zeros(1, np.float32) for _ in range(about["tensors"])]
    for step in range(about["steps"]):
        begun, processor = time.perf_counter(), time.process_time()
        submit(native, tensors, 0.0 if step == 0 else about["backward"])
        seconds = time.perf_counter() - begun
        time.sleep(max(0.0, about["step"] - seconds))  # messages after the last tensor count, too
        print(json.dumps({"processor": time.process_time() - processor, "seconds": seconds}), flush=True)
    if about.get("idle"):
        measure_idle(about["idle"])


def submit(native: core.Engine, tensors: list[np.ndarray], seconds: float) -> None:
    """Submit all tensors, spread evenly over some seconds, and wait for all."""
    begun = time.perf_counter()
    handles: list[Any] = []
    while len(handles) < len(tensors):
        age = time.perf_counter() - begun
        ready = len(tensors) if age >= seconds else int(len(tensors) * age / seconds)
        handles += [
            native.allreduce(tensors[k], tensors[k], f"tensor.{k}", int(Sum), 1.0, 1.0)
            for k in range(len(handles), ready)
        ]
        if ready < len(tensors):
            time.sleep(PAUSE)
    for handle in handles:
        handle.wait()


def measure_idle(seconds: float) -> None:
    """Stay idle for a while, and print the processor time used."""
    processor = time.process_time()
    time.sleep(seconds)
    print(json.dumps({"idle": time.process_time() - processor}), flush=True)


if __name__ == "__main__":
    main()
