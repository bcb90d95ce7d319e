"""A thread that works beside the program: it ends when it is told to, and nobody waits for it without a limit."""

from __future__ import annotations

import threading
import time

from engine.host.background import BackgroundThread

from ..waiting import until


def test_a_thread_works_until_it_is_told_to_end() -> None:
    done: list[str] = []

    def work(over: threading.Event) -> None:
        done.append(threading.current_thread().name)
        over.wait()
        done.append("end")

    thread = BackgroundThread("worker", work)
    thread.start()
    until(lambda: done, "it works")
    assert done == ["worker"]
    thread.stop(60)
    assert done == ["worker", "end"]
    thread.stop(60)


def test_the_wait_for_a_thread_that_goes_on_has_a_limit() -> None:
    free = threading.Event()
    thread = BackgroundThread("worker", lambda over: bool(free.wait(100)) and None)
    thread.start()
    begun = time.monotonic()
    thread.stop(0.05)
    assert 0.05 <= time.monotonic() - begun < 50
    free.set()


def test_a_thread_that_was_not_started_is_not_waited_for() -> None:
    BackgroundThread("worker", lambda over: None).stop(60)
