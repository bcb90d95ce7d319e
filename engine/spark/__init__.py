"""Training in a Spark application: `run`, `run_elastic`, `HorovodRunner`. The only package that imports pyspark."""

from .elastic import run_elastic
from .horovod_runner import HorovodRunner
from .job import run

__all__ = ["HorovodRunner", "run", "run_elastic"]
