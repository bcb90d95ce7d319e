"""Timer of the input of torch: batches of `torch.utils.data.DataLoader` are timed without a change of the program.

The timer replaces two functions of torch by ones that call them: `DataLoader.__iter__`, which may start workers, and
`__next__` of the iterators. Where torch has no such function, nothing is replaced, and `engine.data.time_input` is the
way to time a loader.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, dataloader

from ..metrics import step_parts

_MARK = "_engine_times_input"  # attribute of a function that has been replaced


def time_loaders() -> None:
    """Time the batches of every DataLoader from now on, if this process counts; once is enough."""
    if not step_parts.is_clocked():
        return
    for owner, name in ((DataLoader, "__iter__"), (getattr(dataloader, "_BaseDataLoaderIter", None), "__next__")):
        function = vars(owner).get(name) if owner is not None else None
        if callable(function) and not hasattr(function, _MARK):
            setattr(owner, name, _time_function(function))


def _time_function(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that calls `function` and counts its time as input while this process counts."""

    @functools.wraps(function)
    def call_timed(self: Any) -> Any:
        return step_parts.time_input(function, self)

    setattr(call_timed, _MARK, True)
    return call_timed
