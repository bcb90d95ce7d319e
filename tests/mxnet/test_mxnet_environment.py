"""MXNet's versions and imports, and the names that Horovod's scripts use."""

from __future__ import annotations

import subprocess
from pathlib import Path

from ..compat.test_migration import MXNET
from ..frameworks.test_table import IMPORTS
from .environment import PACKAGES, PYTHON, ROOT

VERSIONS = """
import mxnet, numpy
print(f"mxnet=={mxnet.__version__}", f"numpy=={numpy.__version__}")
"""

PAGE = """
import sys
sys.path.append(sys.argv[1])
from tests.frameworks.test_frameworks_page import names_that_are_told_wrongly
print(names_that_are_told_wrongly("MXNet", "mxnet"))
"""

SCRIPT = """
from engine.compat import install
install()
import horovod.mxnet as hvd
from horovod.mxnet.mpi_ops import allreduce
import engine.mxnet
assert allreduce is hvd.allreduce is engine.mxnet.allreduce
star = {}
exec("from horovod.mxnet import *", star)
print(*sorted(star))
"""


def says(code: str, *arguments: str) -> str:
    """Run code in the Python that has MXNet; return its output."""
    done = subprocess.run(
        [PYTHON, "-c", code, *arguments], capture_output=True, text=True, timeout=100, cwd=Path.home()
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_versions_are_those_that_go_together() -> None:
    assert says(VERSIONS) == " ".join(PACKAGES)


def test_the_binding_imports_no_other_framework() -> None:
    assert says(IMPORTS, "mxnet", "torch", "tensorflow", "keras", "jax") == "frameworks: []\nbindings: []"


def test_horovods_names_are_there_behind_the_switch() -> None:
    """Covers the names that docs/how-to/horovod.md lists, and those that every framework has."""
    there = set(says(SCRIPT).split())
    assert {name.partition(".")[2] for name in MXNET} | {"init", "rank", "size", "broadcast_object", "Average"} <= there


def test_docs_frameworks_tells_of_the_names_as_it_is() -> None:
    assert says(PAGE, str(ROOT)) == "[]"
