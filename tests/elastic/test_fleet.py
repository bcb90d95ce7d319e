"""The fleet: agents that start, answer late or never, and what they are told meanwhile."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.host import network
from engine.launch.channel import GREETING, pack
from engine.launch.discovery import Names
from engine.launch.fleet import Fleet

from ..waiting import until
from .fake_agents import job_of, ready

WORKER = {"worker": 0, "number": 0, "slot": 0, "rank": 0, "size": 1, "local_size": 1}


class Fleets:
    """Fleets of one test, and what they tell.

    Attributes
    ----------
    lost : list of str
        Hosts whose agents were lost.
    at_loss : callable
        Called with each.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.lost: list[str] = []
        self.at_loss: Callable[[str], None] = lambda host: None
        self._made: list[Fleet] = []

    def make(self, hosts: Collection[str], agent: str, seconds: float = 10.0, here: Collection[str] = ()) -> Fleet:
        """A fleet of agents that a shell's command is."""
        (self.home / "agent").write_text(agent)
        options, job = job_of(self.home, hosts, f"env HOST={{host}} sh {self.home}/agent")

        def nothing(*_: Any) -> None: ...

        fleet = Fleet(options, job, Names(here), True, {}, (), (), seconds, nothing, self._lose, nothing, nothing, nothing)
        self._made.append(fleet)
        return fleet

    def close(self) -> None:
        for fleet in self._made:
            fleet.close()

    def _lose(self, host: str, why: str, within: float) -> None:
        self.lost.append(host)
        self.at_loss(host)


@pytest.fixture
def fleets(tmp_path: Path) -> Iterator[Fleets]:
    made = Fleets(tmp_path)
    yield made
    made.close()


def step_until(fleet: Fleet, condition: Callable[[], object], what: str) -> None:
    def step() -> object:
        fleet.step(0.02)
        return condition()

    until(step, what, 20.0)


def test_two_hosts_may_be_late_at_once(fleets):
    """What follows from the loss of the first may be that the second is given up."""
    fleet = fleets.make(["a", "b"], "exec sleep 600", seconds=0.05)
    fleets.at_loss = lambda host: fleet.disown("b" if host == "a" else "a")
    for host in ("a", "b"):
        fleet.launch(host, 1, WORKER)
    step_until(fleet, lambda: len(fleet) == 0, "the loss of both")
    assert fleets.lost == ["a"]
