"""Training in a running Spark application: `run`, `HorovodRunner`. The only package that imports pyspark."""

from .horovod_runner import HorovodRunner
from .job import run

__all__ = ["HorovodRunner", "run"]
