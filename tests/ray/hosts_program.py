"""Caller of jobs on two hosts, which are nodes of one Ray cluster: `python hosts_program.py ADDRESS FILE`.

The file appears when the ranks of the last job run, so that the test can cut off the second host.
"""

from __future__ import annotations

import os
import sys

import ray

from engine.launch import JobError
from engine.ray import RayExecutor
from tests.ray import programs

ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
settings = RayExecutor.create_settings(timeout_s=30, placement_group_timeout_s=40)
executor = RayExecutor(settings, num_hosts=2, num_workers_per_host=2)
executor.start()
try:
    for _ in range(2):
        found = executor.run(programs.add)
        print([each["place"] for each in found], [each["total"] for each in found] == [[6.0] * 3] * 4)
    hubs = executor.run(programs.variables, ("ENGINE_HUB", "ENGINE_HOST_NAME"))
    print(len({hub for hub, _ in hubs}), sorted({str(host) for _, host in hubs}))
    try:
        executor.run(programs.die_in, (3,))
    except JobError as error:
        print("killed:", error.rank, executor._standings[3].address in str(error).partition(";")[0])
    executor.shutdown()
    executor.start()
    try:
        executor.run(programs.work_until_it_fails, (sys.argv[2],))
    except JobError as error:
        print(error, file=sys.stderr)
        lost = executor._standings[error.rank].address  # Ray chooses the node of each rank
        print("cut off:", lost, lost in str(error).partition(";")[0], flush=True)
finally:
    executor.shutdown()
os._exit(0)  # Ray would wait for the unreachable node
