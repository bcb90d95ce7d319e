"""Spark sessions for tests: one at a time in a process, and nothing of it left afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import engine

CONF = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


@contextlib.contextmanager
def session(master: str) -> Iterator[Any]:
    """Start Spark, and end its JVM at the end.

    Parameters
    ----------
    master : str
        `local[N]` or `local-cluster[...]`, whose workers write below the directory of the sources of Spark unless told
        otherwise.
    """
    pytest.importorskip("pyspark", reason="needs pyspark 4", exc_type=ImportError)
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.skip("needs Java 17 or newer")
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    root = str(Path(engine.__file__).parents[1])
    with tempfile.TemporaryDirectory(prefix="spark-test-") as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_WORKER_DIR", directory)
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        patch.setenv("PYTHONPATH", os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]))
        builder = SparkSession.builder.master(master).config("spark.local.dir", directory)
        for name, value in CONF.items():
            builder = builder.config(name, value)
        found = builder.getOrCreate()
        found.sparkContext.setLogLevel("OFF")
        try:
            yield found
        finally:
            found.stop()
            gateway, SparkContext._gateway, SparkContext._jvm = SparkContext._gateway, None, None
            gateway.shutdown()
            gateway.proc.stdin.close()
            gateway.proc.wait(30)
