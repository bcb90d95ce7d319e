"""Startup hook of every Python process with this directory on its PYTHONPATH: see `engine.host.python_startup`.

It imports nothing of the engine until a program imports `horovod`, and uses only modules that Python has imported by
then, because it slows the start of every Python. A `sitecustomize` hidden by this one is run, too.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec


class Switch:
    """Finder that installs the finder of `engine.compat` when a module of Horovod is imported."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Find a module of Horovod; return None for any other."""
        if name.partition(".")[0] != "horovod":
            return None
        try:
            from enginerun.compat import install  # also where another package is called `engine`
        except ModuleNotFoundError as error:
            if error.name not in ("enginerun", "enginerun.compat"):
                raise
            text = f"no module {name!r}: enginerun stands in for it under --horovod, and {sys.executable} has none"
            raise ModuleNotFoundError(text, name=name) from error
        found: ModuleSpec | None = install().find_spec(name, path, target)
        return found


def run_the_hidden_one() -> None:
    """Remove our directory from the path, and import the `sitecustomize` that is found then."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != here]
    own = sys.modules.pop("sitecustomize")
    try:
        __import__("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = own


sys.meta_path.insert(0, Switch)
run_the_hidden_one()
