"""Training in a Spark application: `run`, `run_elastic`, `HorovodRunner`. The only package that imports pyspark."""

from .elastic import run_elastic
from .horovod_runner import HorovodRunner, log_to_driver
from .job import run

__all__ = ["HorovodRunner", "log_to_driver", "run", "run_elastic"]
