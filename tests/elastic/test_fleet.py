"""The fleet: agents that start, answer late or never, and the messages that they get meanwhile."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.host import network
from engine.launch.elastic import agents as fleet_module
from engine.launch.elastic.agents import Fleet
from engine.launch.elastic.discovery import Names
from engine.launch.hosts.channel import GREETING, Message, pack
from engine.launch.hosts.host_list import Place
from engine.launch.hosts.remote import RemoteHost
from engine.metrics import page

from ..metrics.written_pages import content
from ..waiting import until
from .fake_agents import job_of, ready

# An agent that sends a file's content, and then nothing until its channel ends.
SAYING = 'cat "$(dirname "$0")/$HOST"; while read -r line; do :; done'
WORKER = {"worker": 0, "number": 0, "slot": 0, "rank": 0, "size": 1, "local_size": 1}


class Fleets:
    """Fleets of one test, and their reports.

    Attributes
    ----------
    lost : list of str
        Hosts whose agents were lost, in order.
    told : list of str
        Lines that agents have printed.
    at_loss : callable
        Function that is called with each lost host.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.lost: list[str] = []
        self.told: list[str] = []
        self.at_loss: Callable[[str], None] = lambda host: None
        self._made: list[Fleet] = []

    def make(
        self,
        hosts: Collection[str],
        agent: str,
        seconds: float = 10.0,
        here: Collection[str] = (),
        pages: Sequence[int] = (),
    ) -> Fleet:
        """Make a fleet whose agents run a shell's command."""
        (self.home / "agent").write_text(agent)
        options, job = job_of(self.home, hosts, f"env HOST={{host}} sh {self.home}/agent")

        def nothing(*_: Any) -> None: ...

        fleet = Fleet(
            options, job, Names(here), True, {}, (), pages, seconds, self._tell, self._lose, nothing, nothing, nothing
        )
        self._made.append(fleet)
        return fleet

    def close(self) -> None:
        for fleet in self._made:
            fleet.close()

    def _tell(self, host: str, message: Message) -> None:
        self.told.append(message.text("line"))

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
    """The loss of the first host may cause the second to be given up."""
    fleet = fleets.make(["a", "b"], "exec sleep 600", seconds=0.05)
    fleets.at_loss = lambda host: fleet.disown("b" if host == "a" else "a")
    for host in ("a", "b"):
        fleet.launch(host, 1, WORKER)
    step_until(fleet, lambda: len(fleet) == 0, "the loss of both")
    assert fleets.lost == ["a"]


def test_the_page_of_a_slot_is_copied_from_the_host_that_used_it_last(fleets):
    """Both hosts report steps of slot 0's worker; reports of the old host are ignored."""
    for steps, host in enumerate(("new", "old"), 1):
        clocks = {"monotonic": time.monotonic_ns(), "unix": time.time_ns()}
        body = zlib.compress(content(state=1, steps=steps))
        told = pack("pages", body, changed=[0], states=[[0, "S"]], **clocks)
        (fleets.home / host).write_bytes(GREETING + ready() + told + pack("say", line=host))
    copies = [page.make(), page.make()]
    fleet = fleets.make(["new", "old"], SAYING, pages=copies)
    for number, host in enumerate(("new", "old")):
        fleet.launch(host, 1, WORKER | {"number": number})
        step_until(fleet, lambda host=host: host in fleets.told, f"what {host} says behind its page")
    kept = page.read(copies[0])
    assert kept is not None and kept["steps"] == 1
    for copy in copies:
        os.close(copy)


def test_the_driver_waits_for_no_name_server(fleets, monkeypatch):
    """The address by which others reach this machine is looked up in the background; until then its name is used."""
    answer = threading.Event()
    monkeypatch.setattr(network, "own_address", lambda other: answer.wait(30) and f"own address for {other}")
    monkeypatch.setattr(fleet_module, "agent_command", lambda *_: ["sh", "-c", "exec sleep 600"])
    fleet = fleets.make(["localhost", "b"], "", here={"localhost"})
    try:
        fleet.launch("localhost", 1, WORKER)
        fleet.launch("b", 1, WORKER | {"number": 1})
        assert fleet.reached_by("localhost", ["localhost", "b"]) == socket.gethostname()
    finally:
        answer.set()
    until(lambda: fleet.reached_by("localhost", ["localhost", "b"]) == "own address for b", "the answer")


def test_a_name_that_cannot_be_looked_up_leads_nowhere():
    """No name server is asked, because a label is empty."""
    assert network.own_address("a..b") is None


def test_an_agent_that_is_not_ready_is_told_of_no_signal(fleets):
    """A signal would come out of turn: such an agent has no workers, and would end with a traceback."""
    heard = fleets.home / "heard"
    fleet = fleets.make(["a"], f"cat > {heard}; true")
    fleet.launch("a", 1, WORKER)
    step_until(fleet, lambda: heard.exists() and b'"prepare"' in heard.read_bytes(), "the first message")
    fleet.signal(signal.SIGTERM)
    fleet.finish()
    assert b'"signal"' not in heard.read_bytes() and b'"finish"' not in heard.read_bytes()


def test_the_end_of_a_job_waits_for_no_agent_that_never_answered(fleets):
    fleet = fleets.make(["a"], "exec sleep 600")
    fleet.launch("a", 1, WORKER)
    began = time.monotonic()
    fleet.finish()
    assert time.monotonic() - began < 10
    assert fleets.lost == []


def test_what_carried_a_channel_and_lives_on_keeps_nobody_waiting(fleets):
    """The process is like an ssh that lost its peer but serves others: leases of other hosts may be 2 s long."""
    fleet = fleets.make(["a"], "exec sleep 600 > /dev/null")
    fleet.launch("a", 1, WORKER)
    began = time.monotonic()
    step_until(fleet, lambda: fleets.lost, "the loss of a")
    assert time.monotonic() - began < 2
    assert fleets.lost == ["a"]


def test_a_host_that_says_without_end_why_it_fails_keeps_nobody_waiting(monkeypatch):
    host = RemoteHost(0, Place("a", (), False), ["ssh"])
    portions = iter(["again"] * 1000)
    host.errors = 1000
    monkeypatch.setattr(host, "hear_errors", lambda: [next(portions)])
    host.said()
