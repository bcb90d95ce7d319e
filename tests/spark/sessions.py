"""Spark in tests: one application at a time in a process, kept while the next test asks for the same."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import engine

JAVA = 17  # the oldest that Spark 4 supports
CONF = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


def skip_without_spark() -> None:
    """Skip where Spark cannot be started, and say what it needs."""
    pytest.importorskip("pyspark", reason="needs pyspark 4", exc_type=ImportError)
    version = java_version()
    if version < JAVA:
        pytest.skip(f"needs Java {JAVA} or newer, and there is {version or 'none'}")


@functools.cache
def java_version() -> int:
    """Version of the Java that Spark would start, or 0 if there is none."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else "java"
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60).stderr
    except OSError:
        return 0
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    return int(found[1]) if found else 0


class Spark:
    """The running application, and its JVM."""

    def __init__(self) -> None:
        self._master = ""
        self._session: Any = None
        self._directory = ""
        self._patch = pytest.MonkeyPatch()

    def session(self, master: str, conf: Mapping[str, str] | None = None) -> Any:
        """Session of an application with that master; an application with another one is ended.

        The master is `local[N]` or `local-cluster[...]`. `conf` must be the same for every call with that master.
        """
        skip_without_spark()
        if self._master != master:
            self.end()
            self._start(master, conf or {})
        return self._session

    def _start(self, master: str, conf: Mapping[str, str]) -> None:
        from pyspark.sql import SparkSession

        self._directory = tempfile.mkdtemp(prefix="spark-test-")
        root = str(Path(engine.__file__).parents[1])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        # Workers of a local cluster write below the directory of Spark itself unless told otherwise.
        for name, value in {
            "SPARK_WORKER_DIR": self._directory,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,  # used by executors; otherwise python3 on PATH
            "PYTHONPATH": path,
        }.items():
            self._patch.setenv(name, value)
        builder = SparkSession.builder.master(master).config("spark.local.dir", self._directory)
        for name, value in (CONF | dict(conf)).items():
            builder = builder.config(name, value)
        self._session = builder.getOrCreate()
        self._session.sparkContext.setLogLevel("OFF")
        self._master = master

    def end(self) -> None:
        """End the application and its JVM, if there is one."""
        if not self._master:
            return
        from pyspark import SparkContext

        self._master = ""
        gateway = SparkContext._gateway
        assert gateway is not None
        try:
            self._session.stop()
        finally:
            SparkContext._gateway, SparkContext._jvm = None, None
            gateway.shutdown()
            gateway.proc.stdin.close()
            gateway.proc.wait(30)
            shutil.rmtree(self._directory, ignore_errors=True)
            self._patch.undo()
