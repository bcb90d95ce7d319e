"""A caller with an executor and two elastic jobs at once, to be killed: `python callers_program.py DIRECTORY`.

It does not call `ray.init`. Before that, it calls `ray.shutdown` too early.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import ray

from engine.launch import LaunchError
from engine.ray import ElasticRayExecutor, RayExecutor
from engine.ray.slots import EVERY
from tests.ray import elastic_programs, programs
from tests.waiting import let_pass


def started() -> tuple[RayExecutor, list[ElasticRayExecutor]]:
    """Start an executor of one rank, and two elastic jobs."""
    ranks = RayExecutor(num_workers=1)
    jobs = [ElasticRayExecutor(ElasticRayExecutor.create_settings(min_np=1, max_np=1)) for _ in range(2)]
    ranks.start()
    for job in jobs:
        job.start()
    return ranks, jobs


home = Path(sys.argv[1])
ranks, jobs = started()
print("slots", [job.num_workers for job in jobs], flush=True)
ray.shutdown()
let_pass(3 * EVERY)
print("connected", ray.is_initialized(), flush=True)
try:
    ranks.run(programs.add)
except LaunchError as error:
    print(str(error).partition(":")[0], flush=True)
for job in jobs:
    job.shutdown()
ranks.shutdown()
print("connected", ray.is_initialized(), flush=True)

ranks, jobs = started()
for number, job in enumerate(jobs):
    (home / str(number)).mkdir()
    arguments = [str(home / str(number))]
    threading.Thread(target=job.run, args=(elastic_programs.add_up,), kwargs={"args": arguments}, daemon=True).start()
(found,) = ranks.run(programs.add)
print("rank", found["pid"], flush=True)
ranks.run(programs.work_until_it_fails, (str(home / "at-work"),))
