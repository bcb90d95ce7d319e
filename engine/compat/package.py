"""Names of `horovod`, `horovod.runner`, `horovod.run` and `horovod.version`."""

from __future__ import annotations

from .. import run

__all__ = ["__version__", "run"]

# Version of Horovod whose names and semantics are kept; scripts compare it.
__version__ = "0.28.1"
