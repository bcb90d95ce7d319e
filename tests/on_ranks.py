"""Tests that run on ranks, each with its own pytest id: how they are marked, and how a rank runs them.

    pytestmark = on_ranks(1, 2, 3, 4)

    @pytest.mark.parametrize("rows", [0, 3])
    def test_rows_are_gathered(rows: int, rank: int, size: int) -> None:
        ...

gives `test_rows_are_gathered[1-0]`, `[1-3]`, `[2-0]` and so on. Those that were chosen and need equal ranks share a
job, in which each rank calls one after the other (shared_jobs.py is pytest's side). Values of parameters are pickled.

A test compares after its last collective, or compares what all ranks hold alike: where it fails on one rank, the others
go on to the next test, and must not wait for this one. What a test leaves behind, its successors have to bear: names
are known, and a knob that was set stays so. Each module has a world of its own.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import pytest

import engine

OUTCOMES = "outcomes"  # the file of a rank is `outcomes.0` in the job's directory
BEGUN, PASSED, FAILED, SKIPPED = "begun", "passed", "failed", "skipped"


@dataclass(frozen=True)
class Ranks:
    """The ranks that a test needs."""

    size: int
    label: str = ""  # part of the test's id, where `size` is not enough
    env: tuple[tuple[str, str], ...] = ()  # variables of the job
    python: str = ""  # interpreter of the ranks; empty: the one that runs the tests
    # Other numbers of ranks cover the same: the test is then slow, unless `--only-ranks` asks for this number
    spare: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return f"{self.size}-{self.label}" if self.label else str(self.size)


def spare(size: int) -> Ranks:
    """Return `Ranks` of this size, marked as a spare number of ranks."""
    return Ranks(size, spare=True)


def on_ranks(
    *ranks: int | Ranks,  # the test runs once with each
    # Options of `engine.init`, which is called before the test; None: the test calls it
    world: Mapping[str, Any] | None = {},
    env: Mapping[str, str] | None = None,  # variables of the job
    job: str = "",  # name shared by the tests of one job; by default the tests of a directory share one
    python: str = "",  # interpreter of the ranks; by default the one that runs the tests
) -> pytest.MarkDecorator:
    """Mark a test, or all of a module, as one that runs on ranks; the mark of a test replaces that of its module."""
    variables = tuple((env or {}).items())
    told = (Ranks(each) if isinstance(each, int) else each for each in ranks)
    return pytest.mark.on_ranks(
        ranks=tuple(replace(each, env=each.env + variables, python=python) for each in told),
        world=world,
        job=job,
    )


def per_size(name: str, values: Callable[[int], Iterable[Any]]) -> pytest.MarkDecorator:
    """Parametrize a test like `pytest.mark.parametrize`, with values computed from the number of ranks."""
    return pytest.mark.per_size(name, values)


@dataclass(frozen=True)
class Case:
    """A test with its parameters, in the form in which it is sent to ranks."""

    module: str
    function: str
    parameters: dict[str, Any]
    world: Mapping[str, Any] | None


@dataclass
class Worlds:
    """The engine's world on a rank, kept from one test to the next."""

    current: Any = None

    def enter(self, case: Case) -> None:
        wanted = None if case.world is None else (case.module, dict(case.world))
        if engine.is_initialized() and (wanted is None or wanted != self.current):
            engine.shutdown()
        if wanted is not None and not engine.is_initialized():
            engine.init(**wanted[1])
        self.current = wanted

    def settle(self) -> None:
        """Wait for the other ranks."""
        if engine.is_initialized() and self.current is not None:
            engine.barrier("between tests")


def run(cases: list[Case], first: int) -> None:
    """Run tests on this rank, those from number `first` on, and write the outcome of each as soon as it is over."""
    worlds = Worlds()
    with open(f"{OUTCOMES}.{os.environ['RANK']}", "w", buffering=1) as told:
        for number, case in enumerate(cases[first:], first):
            told.write(json.dumps([number, BEGUN, ""]) + "\n")
            worlds.enter(case)
            over = False
            try:
                call(case)
                outcome = PASSED, ""
            except pytest.skip.Exception as reason:
                outcome = SKIPPED, str(reason)
            except (Exception, pytest.fail.Exception) as error:
                over = isinstance(error, engine.errors.WorldError)
                outcome = FAILED, shown(error)
            told.write(json.dumps([number, *outcome]) + "\n")
            if over:
                raise SystemExit("the world is over, and with it the tests that it was for")
            worlds.settle()
    if engine.is_initialized():
        engine.shutdown()


def call(case: Case) -> None:
    """Call the function of a test with the arguments that it asks for."""
    function = getattr(import_module(case.module), case.function)
    parts = Parts()
    known = {
        "rank": int(os.environ["ENGINE_RANK"]),
        "size": int(os.environ["ENGINE_SIZE"]),
        "parts": parts,
    }
    wanted = inspect.signature(function).parameters
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    function(**case.parameters, **{name: value for name, value in known.items() if name in wanted})
    if "parts" in wanted:
        parts.done()


def shown(error: Exception) -> str:
    """Return the traceback, without frames above the test."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") == __name__ and trace.tb_next is not None:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


@dataclass
class Parts:
    """Checks of one test that do not hide each other: a test that asks for `parts` fails at its end, with all of them.

    for op in OPS:
        with parts.part(op): ...
    """

    count: int = 0
    failures: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def part(self, name: object) -> Iterator[None]:
        """Run a part, which does all its collectives before it compares."""
        self.count += 1
        try:
            yield
        except engine.errors.WorldError:
            raise
        except (Exception, pytest.fail.Exception):
            self.failures[str(name)] = traceback.format_exc(limit=-4)

    def done(self) -> None:
        """Raise an error with all failed parts."""
        if self.failures:
            told = "\n".join(f"{name}: {text[:2000]}" for name, text in list(self.failures.items())[:8])
            raise AssertionError(f"{len(self.failures)} of {self.count} parts failed\n{told}")
        assert self.count, "no part was run"
