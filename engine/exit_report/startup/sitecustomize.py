"""Startup hook of every Python that has this directory on its PYTHONPATH: see `engine.exit_report`.

It does not import the engine: the program may have a module of that name, and the code here delays every start of
Python. If this file hides another `sitecustomize`, that one runs too.
"""

from __future__ import annotations

import os
import sys


def install_writer() -> None:
    """Load `engine.exit_report.writer` without its parent packages, and install it."""
    sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))
    try:
        import writer  # type: ignore[import-not-found]  # found on the path of the line above
    finally:
        del sys.path[0]
    sys.modules["engine.exit_report.writer"] = sys.modules.pop("writer")  # `import engine` then uses this module
    writer.install()


def run_the_hidden_one() -> None:
    """Remove this directory from `sys.path`, and import the next `sitecustomize` on the path, if there is one."""
    here = os.path.dirname(__file__)
    sys.path[:] = [path for path in sys.path if path != here]
    own = sys.modules.pop("sitecustomize")
    try:
        __import__("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = own


if "ENGINE_EXIT_REPORT" in os.environ:
    install_writer()
run_the_hidden_one()
