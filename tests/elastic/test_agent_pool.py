"""The pool of agents: agents that start, answer late or never, and the messages that they get meanwhile."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import pytest

from engine.elastic.places import Slot
from engine.host import network
from engine.launch.driver import Driver, JobPolicy, JobSetup
from engine.launch.elastic import agent_pool
from engine.launch.elastic.agent_pool import AgentPool
from engine.launch.elastic.discovery import Names
from engine.launch.elastic.slots import SlotNumbers
from engine.launch.hosts.channel import GREETING, Message, pack_message
from engine.launch.hosts.host_list import HostRanks
from engine.launch.hosts.remote import RemoteHost
from engine.launch.process.supervisor import Outcome
from engine.metrics import page

from ..metrics.written_pages import content
from ..waiting import until
from .fake_agents import job_of, ready

# An agent that sends a file's content, and then nothing until its channel ends.
SAYING = 'cat "$(dirname "$0")/$HOST"; while read -r line; do :; done'
WORKER = {"worker": 0, "number": 0, "slot": 0, "rank": 0, "size": 1, "local_size": 1}


class PoolPolicy(JobPolicy):
    """Policy of a driver that has a pool of agents, and starts what a test asks for."""

    members = ()

    def __init__(self, driver: Driver, names: Names, pools: Pools) -> None:
        self.pool = AgentPool(driver, names, True, pools)
        self.handlers = self.pool.handlers
        self.slots = SlotNumbers(2)

    @property
    def agents(self) -> Collection[RemoteHost]:
        return self.pool.agents

    def start(self) -> None: ...

    def advance_job(self) -> None: ...

    def owned_numbers(self, agent: RemoteHost) -> Collection[int]:
        return self.slots.written_by(agent.name)

    def counted_numbers(self, agent: RemoteHost) -> Collection[int]:
        return self.slots.held_by(agent.name)

    def admit_message(self, agent: RemoteHost, message: Message) -> bool:
        return self.pool.admit_message(agent, message)

    def agent_lost(self, agent: RemoteHost, how: str) -> None:
        self.pool.agent_lost(agent, how)

    def prepare_finish(self) -> None:
        self.pool.give_up_unready()

    def end_by(self, signum: int, again: bool) -> None: ...

    def is_running(self, number: int) -> bool:
        return False

    def make_outcome(self) -> Outcome:
        return Outcome([], None)


class Pools:
    """Drivers of one test with pools of agents, and their reports."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.lost: list[str] = []  # hosts whose agents were lost, in order
        self.told: list[str] = []  # lines that a user would see
        self.at_loss: Callable[[str], None] = lambda host: None  # called with each lost host
        self._made: list[tuple[Driver, socket.socket, socket.socket]] = []

    def make(
        self,
        hosts: Collection[str],
        agent: str,
        seconds: float = 10.0,
        here: Collection[str] = (),
        pages: Sequence[int] = (),
    ) -> Driver:
        """Make a driver whose agents run a shell's command."""
        (self.home / "agent").write_text(agent)
        options, job = job_of(self.home, hosts, f"env HOST={{host}} sh {self.home}/agent")
        wakeup, user = socket.socketpair()
        wakeup.setblocking(False)
        setup = JobSetup(options, job, (), pages, {}, wakeup, seconds, self.told.append)
        driver = Driver(setup, lambda driver: PoolPolicy(driver, Names(here), self))
        driver.start_output()
        self._made.append((driver, wakeup, user))
        return driver

    def close(self) -> None:
        for driver, *sockets in self._made:
            with driver:
                pass
            for each in sockets:
                each.close()

    def host_lost(self, host: str, why: str, within: float) -> None:
        self.lost.append(host)
        self.at_loss(host)

    def host_refused(self, host: str, text: str) -> None: ...

    def workers_cleared(self, workers: list[int]) -> None: ...


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[Pools]:
    made = Pools(tmp_path)
    yield made
    made.close()


def pool_of(driver: Driver) -> AgentPool:
    return driver.policy.pool  # type: ignore[attr-defined, no-any-return]


def step_until(driver: Driver, condition: Callable[[], object], what: str) -> None:
    def step() -> object:
        driver.loop.step(0.02)
        pool_of(driver).give_up_silent()
        return condition()

    until(step, what, 20.0)


def test_two_hosts_may_be_late_at_once(pools):
    """The loss of the first host may cause the second to be given up."""
    driver = pools.make(["a", "b"], "exec sleep 600", seconds=0.05)
    pools.at_loss = lambda host: pool_of(driver).give_up_host("b" if host == "a" else "a")
    for host in ("a", "b"):
        pool_of(driver).start_worker(host, 1, WORKER)
    step_until(driver, lambda: len(pool_of(driver)) == 0, "the loss of both")
    assert pools.lost == ["a"]


def test_the_page_of_a_slot_is_copied_from_the_host_that_used_it_last(pools):
    """Both hosts report steps of slot 0's worker; reports of the old host are ignored."""
    for steps, host in enumerate(("new", "old"), 1):
        clocks = {"monotonic": time.monotonic_ns(), "unix": time.time_ns()}
        body = zlib.compress(content(state=1, steps=steps))
        told = pack_message("pages", body, changed=[0], states=[[0, "S"]], **clocks)
        (pools.home / host).write_bytes(GREETING + ready() + told + pack_message("say", line=host))
    copies = [page.make(), page.make()]
    driver = pools.make(["new", "old"], SAYING, pages=copies)
    for number, host in enumerate(("new", "old")):
        driver.policy.slots.assign_number(Slot(host, 0), ())  # type: ignore[attr-defined]
        pool_of(driver).start_worker(host, 1, WORKER | {"number": number})
        step_until(driver, lambda host=host: f"{host}: {host}" in pools.told, f"what {host} says behind its page")
    kept = page.read(copies[0])
    assert kept is not None and kept["steps"] == 1
    for copy in copies:
        os.close(copy)


def test_the_driver_waits_for_no_name_server(pools, monkeypatch):
    """The address by which others reach this machine is looked up in the background; until then its name is used."""
    answer = threading.Event()
    monkeypatch.setattr(network, "own_address", lambda other: answer.wait(30) and f"own address for {other}")
    monkeypatch.setattr(agent_pool, "agent_command", lambda *_: ["sh", "-c", "exec sleep 600"])
    driver = pools.make(["localhost", "b"], "", here={"localhost"})
    try:
        pool_of(driver).start_worker("localhost", 1, WORKER)
        pool_of(driver).start_worker("b", 1, WORKER | {"number": 1})
        assert pool_of(driver).reached_by("localhost", ["localhost", "b"]) == socket.gethostname()
    finally:
        answer.set()
    until(lambda: pool_of(driver).reached_by("localhost", ["localhost", "b"]) == "own address for b", "the answer")


def test_a_name_that_cannot_be_looked_up_leads_nowhere():
    """No name server is asked, because a label is empty."""
    assert network.own_address("a..b") is None


def test_an_agent_that_is_not_ready_is_told_of_no_signal(pools):
    """A signal would come out of turn: such an agent has no workers, and would end with a traceback."""
    heard = pools.home / "heard"
    driver = pools.make(["a"], f"cat > {heard}; true")
    pool_of(driver).start_worker("a", 1, WORKER)
    step_until(driver, lambda: heard.exists() and b'"prepare"' in heard.read_bytes(), "the first message")
    driver.pass_on(signal.SIGTERM)
    driver._finish()
    assert b'"signal"' not in heard.read_bytes() and b'"finish"' not in heard.read_bytes()


def test_the_end_of_a_job_waits_for_no_agent_that_never_answered(pools):
    driver = pools.make(["a"], "exec sleep 600")
    pool_of(driver).start_worker("a", 1, WORKER)
    began = time.monotonic()
    driver._finish()
    assert time.monotonic() - began < 10
    assert pools.lost == []


def test_what_carried_a_channel_and_lives_on_keeps_nobody_waiting(pools):
    """The process is like an ssh that lost its peer but serves others: leases of other hosts may be 2 s long."""
    driver = pools.make(["a"], "exec sleep 600 > /dev/null")
    pool_of(driver).start_worker("a", 1, WORKER)
    began = time.monotonic()
    step_until(driver, lambda: pools.lost, "the loss of a")
    assert time.monotonic() - began < 2
    assert pools.lost == ["a"]


def test_a_host_that_says_without_end_why_it_fails_keeps_nobody_waiting(monkeypatch):
    host = RemoteHost(0, HostRanks("a", (), False), ["ssh"])
    portions = iter(["again"] * 1000)
    host.errors = 1000
    monkeypatch.setattr(host, "hear_errors", lambda: [next(portions)])
    host.last_output()


@pytest.mark.parametrize("end", ["", "\\n"])
def test_what_a_host_said_last_is_known_after_it_was_closed(end):
    """The loop that reads its stderr may have been told of its end first."""
    host = RemoteHost(0, HostRanks("a", (), False), ["sh", "-c", f"printf 'first\\nthe cause{end}' >&2; exit 255"])
    host.start()
    until(host.has_ended, "the end of the command", 20.0)
    host.close()
    assert host.last_output() == "first / the cause"
