"""The names of `horovod`, `horovod.runner`, `horovod.run` and `horovod.version`."""

from __future__ import annotations

from ..runner.function import run

__all__ = ["__version__", "run"]

# Scripts compare it: the version whose names and meaning are kept.
__version__ = "0.28.1"
