"""Runs as Python starts, in every process with this directory on its PYTHONPATH: see `engine.exit_report`.

The engine itself is not imported: the program may have a module of that name, and every start of a Python pays for what
stands here. The `sitecustomize` that this one hides, if there is one, runs too.
"""

from __future__ import annotations

import os
import sys


def install_writer() -> None:
    """Load `engine.exit_report.writer` without its packages, and have it report how this process ends."""
    sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))
    try:
        import writer  # type: ignore[import-not-found]  # found on the path of the line above
    finally:
        del sys.path[0]
    sys.modules["engine.exit_report.writer"] = sys.modules.pop("writer")  # `import engine` goes on with this one
    writer.install()


def run_the_hidden_one() -> None:
    """Take our directory off the path, and import the `sitecustomize` that is then found."""
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
