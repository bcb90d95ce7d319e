"""Events of operations for torch's profiler, from submission to end. Where none runs, they cost a look at a flag."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch.autograd import profiler

from . import NAME
from .work import EngineWork


class _NoFlags:
    """Flags of a version of torch that has none: no events."""

    _is_profiler_enabled = False


flags: Any = profiler if hasattr(profiler, "_is_profiler_enabled") else _NoFlags
EVENTS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "reducescatter": "reduce_scatter",
}
"""Torch's names of the operations, by the engine's."""


class _Thread(threading.local):
    """State of one thread: the event that it has begun, until a work ends it."""

    event: Any = None


_thread = _Thread()


def begin_event(name: str) -> None:
    """Begin an event of this thread, such as `engine:all_reduce`."""
    end_event()
    event: Any = profiler.record_function(f"{NAME}:{name}")
    _thread.event = event
    event.__enter__()


def end_event_with(work: EngineWork) -> None:
    """Have the event of this thread end with a work, which may be later and on another thread."""
    event, _thread.event = _thread.event, None
    if event is not None:
        event._call_end_callbacks_on_future(work.get_future())


def end_event() -> None:
    """End the event of this thread, if it has begun one: what it stands for has failed."""
    event, _thread.event = _thread.event, None
    if event is not None:
        event.__exit__(None, None, None)


def start_profiled(name: str, start: Callable[..., EngineWork], *arguments: Any) -> EngineWork:
    """Call a function that starts a work, with an event from the call to the end of the work."""
    if not flags._is_profiler_enabled:
        return start(*arguments)
    begin_event(name)
    try:
        work = start(*arguments)
    except BaseException:
        end_event()
        raise
    end_event_with(work)
    return work
