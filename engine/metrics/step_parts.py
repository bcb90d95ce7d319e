"""Parts of a rank's steps that only Python sees: getting a batch, and collecting garbage.

The native clock of steps (engine_ext/control/step_clock.pxd) measures everything else. It is on while the process
counts, and this module is without effect while it is off.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from engine_ext.core import Engine

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")

# Engine of the world in which this process counts; None while it does not count. Read for every batch.
_clocked: Engine | None = None


def watch_steps(engine: Engine) -> Callable[[], None]:
    """Note batches and collections of garbage in the engine's clock of steps from now on; return what ends that."""
    global _clocked
    note = engine.note_collection
    _clocked = engine
    gc.callbacks.append(note)

    def end() -> None:
        global _clocked
        if _clocked is engine:
            _clocked = None
        if note in gc.callbacks:  # A program may have emptied the list.
            gc.callbacks.remove(note)

    return end


def is_clocked() -> bool:
    """Return whether this process counts, and so the parts of its steps."""
    return _clocked is not None


def time_input(function: Callable[[_Argument], _Result], argument: _Argument) -> _Result:
    """Return `function(argument)`; while this process counts, the time of the call counts as input."""
    engine = _clocked
    if engine is None:
        return function(argument)
    engine.begin_input()
    try:
        return function(argument)
    finally:
        engine.end_input()
