"""The event loop of launcher and agents: order of events, wake-ups by threads, back-pressure."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from engine.launch.process.outgoing import BEHIND, Outgoing
from engine.launch.process.reader_loop import ReaderLoop


@pytest.fixture
def loop() -> Iterator[ReaderLoop]:
    with closing(ReaderLoop()) as loop:
        yield loop


@pytest.fixture
def pipes() -> Iterator[list[tuple[int, int]]]:
    """Three pipes, each with a byte to read."""
    pipes = [os.pipe() for _ in range(3)]
    for _, writing in pipes:
        os.write(writing, b".")
    yield pipes
    for pair in pipes:
        for descriptor in pair:
            os.close(descriptor)


@pytest.mark.parametrize("urgent", range(3))
def test_urgent_descriptors_are_handled_before_others_that_are_ready(loop, pipes, urgent):
    called: list[int] = []
    for number, (reading, _) in enumerate(pipes):
        loop.add_reader(reading, lambda number=number: called.append(number), urgent=number == urgent)
    loop.step(0.0)
    assert called[0] == urgent and sorted(called) == [0, 1, 2]


def test_descriptor_removed_by_an_earlier_event_of_the_same_step_is_not_handled(loop, pipes):
    (first, _), *others = pipes
    called: list[int] = []

    def act() -> None:
        for reading, _ in others:
            loop.remove_reader(reading)

    loop.add_reader(first, act, urgent=True)
    for reading, _ in others:
        loop.add_reader(reading, lambda reading=reading: called.append(reading))
    loop.step(0.0)
    assert called == []
    loop.remove_reader(others[0][0])  # a second removal is harmless


def test_thread_wakes_a_waiting_loop_and_its_call_runs_in_the_loops_thread(loop):
    callers: list[threading.Thread] = []
    thread = threading.Thread(target=lambda: loop.wake(lambda: callers.append(threading.current_thread())))
    thread.start()
    loop.step(60.0)
    thread.join()
    assert callers == [threading.current_thread()]


def test_wake_up_after_the_loop_is_closed_does_nothing(loop):
    loop.close()
    loop.wake(lambda: pytest.fail("the loop is closed"))
    loop.remove_reader(0)  # what was registered may still be removed


def test_full_sink_holds_output_until_it_has_room():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    out, held = Outgoing(writing), []
    with closing(ReaderLoop([out])) as loop, open(reading, "rb", buffering=0) as pipe:
        loop.hold_by(held.append)
        out.write(bytes(2 * BEHIND))
        loop.step(0.0)
        left = 2 * BEHIND
        while left:
            left -= len(pipe.read(1 << 20))
            loop.step(0.0)  # which writes more, as there is room
        loop.step(0.0)
        assert held[0] and not held[-1] and not out.waiting
    os.close(writing)
