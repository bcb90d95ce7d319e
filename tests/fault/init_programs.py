"""Programs of ranks for the tests of an `init` that fails on one rank, at each of its steps."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

import engine
from engine.net.rendezvous import local_client, local_server, messages
from engine.session import arguments, monitor, registry, session, startup
from engine.trace import timeline
from engine.tuning import trial_loop

from ..waiting import be_late
from .programs import touch, wait_for

BEFORE = {
    "environment": (arguments.config, "read_environment"),
    "descriptors": (arguments.linux, "open_standard_descriptors"),
    "given": (arguments.config, "read_given"),
    "detect": (arguments, "detect_world"),
    "given sets": (arguments, "make_process_sets"),
    "logs": (arguments.logs, "configure_logger"),
    "session": (arguments, "EngineSession"),
    "listen": (startup, "listen"),
    "kernels": (startup.setup, "use_kernels"),
    "reserve": (startup.linux, "reserve_descriptors"),
    "build": (startup.setup, "segment_info"),
    "knobs of a log": (startup, "PREPARE", "read_known_knobs"),
    "page": (startup, "_open_own_page"),
    "timeline": (session, "Timeline"),
    "join": (startup, "join_world"),
    "gather": (startup, "_gather_ranks"),
    "introduce": (local_server.Hello, "__init__"),
}
"""Steps of a rank before it meets the others, by name.

Each is a module or class, the name of the called function, and its member if the name is that of a tuple.
"""
MEETING = {
    "own pidfd": (messages.linux, "pidfd_open"),
    "listening": (local_server.LocalServer, "_listen"),
    "turn": (local_server.LocalServer, "_handle_events"),
    "hello": (local_server.LocalServer, "_add_member"),
    "segment": (startup.setup, "create_segment"),
    "create": (startup, "_create_memory"),
    "hosting": (local_server.LocalServer, "_make_result"),
    "passing": (local_server.LocalServer, "_send_descriptors"),
    "passed": (local_server, "close_all"),
    "joining": (local_client.LocalClient, "_receive_message"),
    "verdict": (local_client.LocalClient, "_receive_welcome"),
    "joined": (local_client, "Gathered"),
}
"""Steps of the rendezvous. Some are taken by one rank only: on the others nothing fails."""
WITHIN_HOST = ("listening", "hello", "passing", "passed", "joining", "verdict", "joined")
"""Steps between ranks of a host."""
AFTER = {
    "links": (startup, "SetConnector"),
    "spin": (startup, "spin_us"),
    "yield": (startup, "yield_us"),
    "engine": (startup, "_construct_engine"),
    "engine and links": (startup, "_create_engine"),
    "surround": (startup, "_start_services"),
    "begin page": (startup.own_page, "make_start_fields"),
    "device": (startup, "Device"),
    "registry": (startup, "ProcessSetRegistry"),
    "recorder": (startup, "Recorder"),
    "monitor": (startup, "Monitor"),
    "monitor start": (monitor.Monitor, "start"),
    "stacks": (startup.stacks, "enable_stacks"),
    "timeline start": (timeline.Timeline, "start"),
    "engines": (startup, "await_engines"),
    "sets": (registry.ProcessSetRegistry, "add"),
    "forming": (registry.ProcessSetRegistry, "_form_engine"),
    "show": (session.EngineSession, "record_process_set"),
    "serving": (session.InProcess, "start"),
    "tune": (trial_loop.Tuning, "start"),
    "log": (startup, "log_environment"),
    "all": (startup, "OPEN", "await_all"),
}
"""Steps after a rank has met the others."""
STEPS = BEFORE | MEETING | AFTER


class Broken(Exception):
    """Exception that a broken step raises."""

    def __str__(self) -> str:
        return "a step is broken"


@contextmanager
def broken(step: str) -> Iterator[list[str]]:
    """Make a step raise at its first call; yield the list to which its name is then added."""
    owner, name, *member = STEPS[step]
    kept = vars(owner)[name]
    taken = next(each for each in kept if each.__name__ == member[0]) if member else kept
    raised: list[str] = []

    def fail_once(*args: Any, **options: Any) -> Any:
        if not raised:
            raised.append(step)
            raise Broken
        return taken(*args, **options)

    setattr(owner, name, tuple(fail_once if each is taken else each for each in kept) if member else fail_once)
    try:
        yield raised
    finally:
        setattr(owner, name, kept)


def fail_at(steps: list[str], hosts: int) -> list[dict[str, Any]]:
    """Make `init` fail at each of these steps, on each rank in turn, call it again, and return the outcomes."""
    rank, size = int(os.environ["ENGINE_RANK"]), int(os.environ["ENGINE_SIZE"])
    if hosts > 1:
        os.environ["PRETENDED_HOSTS"] = str(hosts)
        import_module("tests.pretended_hosts")
    settings = {"timeline": Path(f"timeline.{rank}"), "metrics": True, "metrics_port": 0}
    engine.init(**settings)  # The counters page and the file of stacks stay open after the first world.
    engine.shutdown()
    seen = []
    for step in steps:
        for culprit in range(size):
            before = state()
            settings["autotune"] = step == "tune"
            sets = [engine.ProcessSet(range(size - 1)), engine.ProcessSet([size - 1])]
            begun = time.monotonic()
            with broken(step) if rank == culprit else quiet() as raised:
                error = attempt(lambda sets=sets: engine.init(sets, **settings))
            row = {"step": step, "culprit": culprit, "rank": rank, "raised": bool(raised), "error": error}
            row |= {"seconds": time.monotonic() - begun, "left": engine.is_initialized()}
            row["state"] = [before, state()]
            row["again"] = attempt(lambda sets=sets: engine.init(sets, **settings))
            row["sum"] = attempt(lambda: float(engine.allreduce(np.ones(3), op=engine.Sum)[0]))
            seen.append(row)
            if not engine.is_initialized():
                return seen
            engine.barrier()
            engine.shutdown()
    return seen


@contextmanager
def quiet() -> Iterator[list[str]]:
    """Break nothing."""
    yield []


def attempt(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or its error as text."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def state() -> dict[str, Any]:
    """Return the number of open descriptors and the names of all threads except the main thread."""
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": sorted(each.name for each in threading.enumerate() if each is not threading.main_thread()),
    }


def broken_end() -> tuple[str, list[str], float, Any]:
    """Make `init` fail on rank 1 before the ranks meet, and the end of its timeline as well.

    Return the error with its notes, the seconds that it took, and the outcome of a second `init`.
    """
    rank = int(os.environ["ENGINE_RANK"])
    options = {"timeline": Path(f"timeline.{rank}"), "start_timeout": 60.0}
    kept, begun, error = timeline.Timeline.stop, time.monotonic(), None

    def stop_and_raise(self: timeline.Timeline) -> None:
        kept(self)
        raise OSError("an end is broken")

    try:
        with broken("join") if rank == 1 else quiet():
            timeline.Timeline.stop = stop_and_raise  # type: ignore[method-assign]
            engine.init(**options)
    except Exception as raised:
        error = raised
    finally:
        timeline.Timeline.stop = kept  # type: ignore[method-assign]
    seconds = time.monotonic() - begun
    return str(error), getattr(error, "__notes__", []), seconds, attempt(lambda: engine.init(**options))


def unequal_calls() -> float:
    """Call `init` on rank 0 twice before it can start, and on rank 1 once."""
    if int(os.environ["ENGINE_RANK"]) == 0:
        for _ in range(2):
            attempt(lambda: engine.init(start_timeout=0.01))
    engine.init()
    return float(engine.allreduce(np.ones(1), op=engine.Sum)[0])


def different_sets() -> Any:
    """Give a process set on rank 0, and none on rank 1."""
    return attempt(lambda: engine.init([[0]] if int(os.environ["ENGINE_RANK"]) == 0 else []))


def wrong_set() -> tuple[list[Any], bool, bool]:
    """Give wrong sets on all ranks, one of which comes late, and then correct ones."""
    errors = []
    for wrong in ([[0], [0, 7]], [[0], [1, 0]], [[0], [0]], [[]]):
        if int(os.environ["ENGINE_RANK"]) == len(errors) % 2:
            be_late(0.3)
        errors.append(attempt(partial(engine.init, wrong)))
    initialized = engine.is_initialized()
    first = engine.ProcessSet([0])
    engine.init([first, [1]])
    return errors, initialized, first.ranks == [0] and engine.global_process_set.ranks == [0, 1]


def stuck_sets(timeout: float) -> float:
    """Wait on rank 0 in two process sets for what no other rank submits; return the seconds that `shutdown` takes."""
    sets = [engine.ProcessSet(ranks) for ranks in ([0, 1], [0, 2], [1, 2])]
    engine.init(sets, shutdown_timeout=timeout)
    if engine.rank() != 0:
        wait_for("over")
        return 0.0
    for each in sets[:2]:
        engine.allreduce_async(np.ones(3), process_set=each)
    begun = time.monotonic()
    engine.shutdown()
    seconds = time.monotonic() - begun
    touch("over")
    return seconds


class Unspeakable(Exception):
    """An exception whose `__str__` raises."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def unspeakable() -> Any:
    """End rank 1 with `Unspeakable`; return what rank 0 is told."""
    engine.init()
    if engine.rank() == 1:
        raise Unspeakable
    return attempt(engine.barrier)
