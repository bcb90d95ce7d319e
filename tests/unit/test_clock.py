"""Ages that cannot wrap, and a process's own sense of elapsed time: the C header by itself, with a fake clock."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest

from engine.host import patience
from engine.host.patience import STEP, Patience

from .header_library import build_library

S = 10**9
END = 2**64 - 1
SHIM = """
#include "engine_ext/platform/atomics.h"
static uint64_t set_ns;
void set_clock(uint64_t ns) { set_ns = ns; }
#define now_ns() set_ns
#include "engine_ext/platform/clock.h"
static patience clock_;
uint64_t age(uint64_t now, uint64_t then) { return age_ns(now, then); }
int overdue(uint64_t now, uint64_t then, uint64_t limit) { return overdue_ns(now, then, limit); }
uint64_t after(uint64_t then, uint64_t ns) { return after_ns(then, ns); }
uint64_t nanoseconds(double seconds) { return seconds_ns(seconds); }
void begin(uint64_t step) { patience_open(&clock_, step); }
uint64_t at(uint64_t now) { return patience_at(&clock_, now); }
uint64_t look(void) { return patience_look(&clock_); }
"""


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = build_library(tmp_path_factory.mktemp("clock"), SHIM)
    for name in ("age", "after", "nanoseconds", "at", "look"):
        getattr(library, name).restype = ctypes.c_uint64
    for name in ("age", "overdue", "after", "at", "begin", "set_clock"):
        getattr(library, name).argtypes = [ctypes.c_uint64] * {"overdue": 3, "age": 2, "after": 2}.get(name, 1)
    library.nanoseconds.argtypes = [ctypes.c_double]
    return library


def test_ages_do_not_wrap_on_a_machine_that_has_just_booted(clock: ctypes.CDLL) -> None:
    assert [clock.age(5, then) for then in (0, 4, 5, 6, END)] == [5, 1, 0, 0, 0]
    assert not clock.overdue(S, S // 2, 600 * S)
    assert clock.overdue(601 * S, S, 600 * S) and not clock.overdue(600 * S, S, 600 * S)
    assert not clock.overdue(END, 0, 0), "a limit of 0 is never over"
    assert not clock.overdue(S, 2 * S, 1), "what is yet to come has no age"


def test_deadlines_and_durations_end_at_the_end_of_time(clock: ctypes.CDLL) -> None:
    assert clock.after(3, 4) == 7 and clock.after(3, END) == END and clock.after(END, 1) == END
    assert [clock.nanoseconds(seconds) for seconds in (-1, 0, 0.5, 1e9, 1e11, float("nan"))] == [
        0,
        0,
        S // 2,
        10**18,
        END,
        0,
    ]


def test_time_between_looks_that_come_in_time_counts(clock: ctypes.CDLL) -> None:
    clock.set_clock(S)
    clock.begin(S)
    for second in range(2, 20):
        clock.set_clock(second * S)
        assert clock.at(second * S) == second * S
        assert clock.look() == second * S


def test_a_suspension_does_not_count_and_the_next_step_neither(clock: ctypes.CDLL) -> None:
    clock.set_clock(10 * S)
    clock.begin(S)
    clock.set_clock(5000 * S)
    assert clock.at(5000 * S) == 11 * S, "before the look, at most a step"
    assert clock.look() == 10 * S
    for later, seen in ((0.5, 10.0), (1.0, 10.0), (1.25, 10.25), (2.0, 11.0)):
        clock.set_clock(int((5000 + later) * S))
        assert clock.look() == int(seen * S), later


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 1.5

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Patience]:
    monkeypatch.setattr(patience, "time", Clock())
    return Patience


def test_a_deadline_of_python_counts_no_more_than_a_step_of_a_suspension(patient: Callable[[float], Patience]) -> None:
    waiting, clock = patient(3.0), patience.time
    clock.now += 0.5  # type: ignore[attr-defined]
    assert (waiting.seconds_left(), waiting.wait()) == (2.5, STEP / 2)
    clock.now += 3600  # type: ignore[attr-defined]
    assert waiting.seconds_left() == 1.5
    clock.now += 1.0  # type: ignore[attr-defined]
    assert (waiting.wait(), waiting.seconds_left()) == (0.5, 0.5)
    clock.now += 1.0  # type: ignore[attr-defined]
    assert (waiting.seconds_left(), waiting.wait()) == (0.0, 0.0)
