"""A Ray Client caller with an executor and an elastic job: `python client_program.py ray://ADDRESS:PORT`."""

from __future__ import annotations

import sys

import ray

from engine.ray import ElasticRayExecutor, RayExecutor
from tests.ray import elastic_programs, programs

ray.init(sys.argv[1], runtime_env={"env_vars": {"OMP_NUM_THREADS": "2"}})
ranks = RayExecutor(num_workers=2)
ranks.start()
try:
    print([each["total"] for each in ranks.run(programs.add)])
    ranks.run(programs.raise_in, (1,))
except ValueError as error:
    print(error.__notes__[0].partition(",")[0])
finally:
    ranks.shutdown()
job = ElasticRayExecutor(ElasticRayExecutor.create_settings(min_np=2, max_np=2))
job.start()
try:
    print([threads for _, _, threads in job.run(elastic_programs.devices)])
finally:
    job.shutdown()
