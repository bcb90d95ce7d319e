"""An environment with MXNet 1.9.1, its last release, and the NumPy that it needs; the rest is that of the tests.

python -m tests.mxnet.environment
"""

from __future__ import annotations

import sys
from pathlib import Path

from tools.environments import ROOT, Environment, NotToBeHadError

__all__ = ["ENVIRONMENT", "PACKAGES", "PYTHON", "ROOT", "NotToBeHadError", "make"]

PACKAGES = ("mxnet==1.9.1", "numpy==1.23.5")
# MXNet imports requests, and pins a version that is too old.
ENVIRONMENT = Environment(ROOT / "build" / "mxnet", (("--no-deps", *PACKAGES), ("requests",)))
PYTHON = ENVIRONMENT.python


def make() -> Path:
    """Make the environment, unless it exists; return its interpreter.

    Raises `NotToBeHadError` if this Python is too new for MXNet, or pip cannot get it.
    """
    if sys.version_info >= (3, 12):
        raise NotToBeHadError("MXNet 1.9.1 and NumPy 1.23.5 have no builds for Python 3.12 and newer")
    return ENVIRONMENT.make_ready()


if __name__ == "__main__":
    print(make())
