"""`engine.spark.run` with Spark Connect, which has no SparkContext."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import engine

from .sessions import skip_without_spark

pytest.importorskip("grpc_status", reason="needs what pyspark[connect] brings", exc_type=ImportError)
pytest.importorskip("zstandard", reason="needs what pyspark[connect] brings", exc_type=ImportError)

PROGRAM = """
import time
from pyspark.sql import SparkSession
import engine.spark
from engine.launch import JobError, LaunchError
from engine.spark import job
from tests.spark import called
from tests.waiting import be_late

spark = SparkSession.builder.remote("local[2]").getOrCreate()
print([found[:2] for found in engine.spark.run(called.place, num_proc=2)])
try:
    engine.spark.run(called.raises_on, (1,), num_proc=2)
except JobError as error:
    print(str(error).splitlines()[-1])
began = time.monotonic()
for wrong in ({"num_proc": 5, "start_timeout": 3}, {}):
    try:
        engine.spark.run(called.place, **wrong)
    except LaunchError as error:
        print(str(error).partition(":")[0])
print(time.monotonic() - began < 30)

def outlasts_the_start():
    be_late(12)
    return called.place()

whole = job.JobSpec
job.JobSpec = lambda **fields: whole(**{**fields, "addresses": ()})  # nobody reaches the driver
print([found[:2] for found in engine.spark.run(outlasts_the_start, num_proc=2, start_timeout=8)])
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_jobs_run_and_fail_as_without_it(tmp_path: Path) -> None:
    """Without a JVM to ask for slots, the engine's own deadline and the server's progress decide."""
    skip_without_spark()
    env = os.environ | {"PYTHONPATH": str(Path(engine.__file__).parents[1]), "SPARK_LOCAL_IP": "127.0.0.1"}
    env["PYSPARK_PYTHON"] = sys.executable
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    said = [line for line in done.stdout.splitlines() if "<stdout>" not in line]
    assert said == [
        "[(0, 2), (1, 2)]",
        "ValueError: rank 1 does not like it",
        "0 of 5 tasks came within 3 s",
        "num_proc is not given, and Spark Connect does not tell how many slots there are",
        "True",
        "[(0, 2), (1, 2)]",
    ], done.stderr
