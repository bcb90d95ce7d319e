"""Checks for enough slots in Spark before a job is submitted; Spark by itself waits for many minutes.

A barrier stage starts when all its tasks can. Spark checks that 40 times, 15 seconds apart, and reports nothing
meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from string import ascii_letters
from typing import Any

from ..launch.errors import LaunchError

REGISTERING = 4.0  # seconds that executors have to register with Spark, before there are too few slots
LOOK = 0.1
UDF = "spark.sql.execution.pyspark.udf"
SAID_EVERY = 30.0


def default_size(session: Any) -> int:
    """Return the default number of ranks: as many as Spark has slots.

    Raises LaunchError for a session of Spark Connect, which has no interface to ask for slots.
    """
    context = context_of(session)
    if context is None:
        raise LaunchError("num_proc is not given, and Spark Connect does not tell how many slots there are: give it")
    return max(1, _count_slots(context))


def context_of(session: Any) -> Any:
    """Return the SparkContext of a session; None with Spark Connect, which has none."""
    if type(session).__module__.startswith("pyspark.sql.connect."):
        return None
    return session.sparkContext


def check(session: Any, size: int, seconds: float, say: Callable[[str], None]) -> None:
    """Wait for free slots, and refuse a job that can never have enough; `say` shows a line.

    Other jobs of the application may take `seconds` to free their slots. Raises LaunchError if there are fewer slots
    than ranks, if too few became free in time, or if Spark's configuration does not allow barrier stages.
    """
    _check_idle(session)
    context = context_of(session)
    if context is None:
        return
    conf = context.getConf()
    if conf.get("spark.dynamicAllocation.enabled", "false").lower() == "true":
        raise LaunchError(
            "spark.dynamicAllocation.enabled is true, and Spark starts no barrier stage then: set it to false, with "
            "spark.executor.instances as many as the ranks need"
        )
    if conf.get("spark.speculation", "false").lower() == "true":
        say("spark.speculation is on: ranks are never started twice, since their tasks are barrier tasks")
    if conf.get("spark.ssl.enabled", "false").lower() == "true":
        say("spark.ssl.enabled is true: that does not concern what ranks send each other, which is not encrypted")
    _await_slots(context, size)
    _await_free(context, size, seconds, say)


def check_elastic(session: Any, least: int) -> None:
    """Raise LaunchError for an elastic job without a SparkContext, or one that can never have `least` ranks."""
    context = context_of(session)
    if context is None:
        raise LaunchError(
            "run_elastic needs executors that reach this process, and a SparkContext; a session of Spark Connect has "
            "neither: run the program on the cluster's driver, or use engine.spark.run, whose jobs have a fixed size"
        )
    _check_idle(session)
    if context.getConf().get("spark.dynamicAllocation.enabled", "false").lower() == "true":
        return  # Spark starts executors for the tasks that wait
    _await_slots(context, least)


def _check_idle(session: Any) -> None:
    """Refuse a configuration in which Spark kills idle tasks: those of ranks return nothing until their end."""
    idle = session.conf.get(f"{UDF}.idleTimeoutSeconds", "0").strip()
    seconds = idle.rstrip(ascii_letters)  # a time of Spark's may have a unit: 60, 60s, 1min
    if seconds.strip("0 ") and session.conf.get(f"{UDF}.killOnIdleTimeout", "false").lower() == "true":
        limit = idle if seconds != idle else f"{idle} s"
        raise LaunchError(
            f"Spark kills Python tasks that are silent for {limit}, as those of ranks are: set "
            f"{UDF}.killOnIdleTimeout to false (or spark.python.worker.killOnIdleTimeout, if that is set)"
        )


def _await_slots(context: Any, size: int) -> None:
    """Give executors time to register with Spark; raise if there are too few slots after that."""
    slots = _count_slots(context)
    end = time.monotonic() + REGISTERING
    while slots < size and time.monotonic() < end:
        time.sleep(LOOK)
        slots = _count_slots(context)
    if slots < size:
        raise LaunchError(
            f"{size} ranks need as many slots at once, and Spark has {slots}: give num_proc={max(slots, 1)}, or more "
            f"or larger executors (master is {context.master}; a slot is spark.task.cpus cores of an executor)"
        )


def _await_free(context: Any, size: int, seconds: float, say: Callable[[str], None]) -> None:
    end, said = time.monotonic() + seconds, float("-inf")
    while True:
        slots, busy = _count_slots(context), _count_busy(context)
        if slots - busy >= size:
            return
        now = time.monotonic()
        if now > end:
            raise LaunchError(
                f"{size} ranks wait for slots since {seconds:g} s: other jobs of this application hold {busy} of "
                f"{slots}; wait for those, or give a longer start_timeout"
            )
        if now - said > SAID_EVERY:
            said = now
            say(_format_waiting(size, busy, slots))
        time.sleep(LOOK)


def held_by_others(session: Any, size: int) -> str:
    """Describe which jobs hold the slots that a submitted job waits for; empty if none do.

    Another job may have been submitted at the same moment, so that `check` has seen none of its tasks.
    """
    context = context_of(session)
    if context is None:
        return ""
    slots, busy = _count_slots(context), _count_busy(context)
    return _format_waiting(size, busy, slots) if busy > 0 and slots - busy < size else ""


def _format_waiting(size: int, busy: int, slots: int) -> str:
    return f"{size} ranks wait for slots: other jobs of this application hold {busy} of {slots}"


def _count_slots(context: Any) -> int:
    """Return how many tasks can run at once, as Spark's scheduler counts them for a barrier stage."""
    scala = context._jsc.sc()
    return int(scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile()))


def _count_busy(context: Any) -> int:
    """Return how many tasks run, as Spark's scheduler counts them; its status tracker lags behind."""
    counts = context._jsc.sc().taskScheduler().runningTasksByExecutors().values().iterator()
    busy = 0
    while counts.hasNext():
        busy += int(counts.next())
    return busy
