"""Tests that run alone, when two run at a time: nothing runs beside them."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from ..side_by_side import ALONE, TOGETHER, SideBySide
from ..waiting import until

TESTS = Path(__file__).parents[1]
BESIDE, LONELY = (SimpleNamespace(path=TESTS / name / "test_it.py") for name in ("unit", ALONE[0]))


@pytest.fixture
def processes() -> Iterator[tuple[SideBySide, SideBySide]]:
    """What the two processes of a run have; here both are in this one."""
    run = uuid4().hex
    both = SideBySide(run), SideBySide(run)
    yield both
    for each in both:
        each.pytest_unconfigure()
    assert not both[0].path.exists()


def begin(process: SideBySide, item: Any, following: Any) -> Generator[None]:
    test = process.pytest_runtest_protocol(item, following)
    next(test)
    return test  # type: ignore[return-value]


def end(test: Generator[None]) -> None:
    assert next(test, "over") == "over"


@pytest.mark.parametrize(("first", "second"), [(BESIDE, LONELY), (LONELY, BESIDE)])
def test_one_that_runs_alone_waits_for_all_others_and_they_for_it(
    first: Any, second: Any, processes: tuple[SideBySide, SideBySide]
) -> None:
    one, other = processes
    begun = threading.Event()
    running = begin(one, first, first)

    def run() -> None:
        test = begin(other, second, None)
        begun.set()
        end(test)

    thread = threading.Thread(target=run)
    thread.start()
    end(running)
    assert not begun.wait(0.2), "the other one began between two tests of the first"
    end(begin(one, first, None))
    until(begun.is_set, "the other one begins")
    thread.join()


def test_those_that_need_not_be_alone_run_beside_each_other(processes: tuple[SideBySide, SideBySide]) -> None:
    tests = [begin(process, BESIDE, None) for process in processes]
    for test in tests:
        end(test)


def test_the_directories_that_are_named_exist() -> None:
    assert all((TESTS / name).is_dir() for name in (*ALONE, *TOGETHER))
