"""Runs as Python starts, in every process with this directory on its PYTHONPATH: see `engine.compat.switch`.

Nothing of the engine is imported until a program asks for `horovod`, and nothing that Python has not imported by then
is used: every start of a Python pays for it. The `sitecustomize` that this one hides, if there is one, runs too.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec


class Switch:
    """A finder that brings the finder of `engine.compat`."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Look for a module, if it is one of Horovod's."""
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
    """Take our directory off the path, and import the `sitecustomize` that is then found."""
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
