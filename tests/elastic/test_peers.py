"""Invalid messages of agents cost only the connection of that agent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.config.builds import Build
from engine.elastic import events
from engine.elastic.machine import Machine
from engine.launch.elastic.worker_messages import WorkerMessageError, check, event_of
from engine.launch.elastic.workers import Workers
from engine.launch.errors import LaunchError
from engine.launch.hosts.channel import pack_message
from engine.net.stream import StreamError

from .fake_agents import drive, ready

AT_THE_GATE = {
    "kind": "ready", "world": 0, "why": "NEW", "text": "", "culprit": None, "commit": None, "stalled": False,
    "build": {"version": "1"}, "port": 0,
}  # fmt: skip


def said(**fields: Any) -> bytes:
    return pack_message("said", worker=0, message=AT_THE_GATE | fields)


def head(text: bytes) -> bytes:
    """Return a message with this head."""
    return (4 + len(text)).to_bytes(4, "big") + len(text).to_bytes(4, "big") + text


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("message", "text"),
    [
        (head(b"[" * 100_000), "the head of a message is damaged: is nested too deeply, more than 32 levels"),
        (head(b"5"), "the head of a message is damaged: a kind and its fields are expected"),
        (head(b'["beat"'), "the head of a message is damaged: no JSON: Expecting ',' delimiter .column 8."),
        (b"\0\0\0\x03abc", "what it writes are no messages of an agent"),
        (pack_message("beat", at="now"), "a message 'beat' has at = 'now' instead of a number"),
        (pack_message("beat", at=float("inf")), "the head of a message is damaged: Infinity is no number of JSON"),
        (head(b'["beat", {"at": 1e400}]'), "the head of a message is damaged: the number 1e400 is beyond 1e.18"),
        (
            pack_message("end", worker=0, code=1, started=True),
            "a message 'end' has killed = None instead of true or false",
        ),
        (pack_message("say", line=["much"]), "a message 'say' has line = .'much'. instead of a text"),
        (pack_message("said", worker=0, message=[1]), "of worker 0 it says None"),
        (said(commit="abc"), "of worker 0 it says 'ready' with commit = 'abc'; install the same version"),
        (said(port=1e6), "of worker 0 it says 'ready' with port = 1000000.0"),
        (said(why="OTHER"), "of worker 0 it says 'ready' because of 'OTHER'"),
        (said(kind="shouts"), "of worker 0 it says 'shouts'"),
        (pack_message("output", number=0, stream="stdin"), "it writes to 'stdin'"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_host_whose_agent_says_what_no_agent_says_is_lost_by_name(tmp_path, message, text):
    with pytest.raises(LaunchError, match=f"^bad: its agent does not speak as an agent does: {text}"):
        drive(tmp_path, {"bad": [ready(), message]}, until="nothing")


def test_an_agent_that_is_ready_without_saying_where_is_lost(tmp_path):
    with pytest.raises(LaunchError, match="a message 'ready' has where = None instead of a text"):
        drive(tmp_path, {"bad": [ready(where=None)]}, until="nothing")


def test_a_text_that_nobody_asked_for_is_passed_over(tmp_path):
    """The log of `engine.ray` in a job that Ray has not started is ignored, and not counted against the host."""
    logged = pack_message("said", worker=0, message={"kind": "logged", "value": "x"})
    end = pack_message("end", worker=0, code=0, killed=True, started=True)
    _, lines = drive(
        tmp_path,
        {"a": [ready(), logged, pack_message("say", line="that is all"), end, pack_message("done")]},
        until="that is all",
    )
    assert not any("lost" in line for line in lines)


def test_a_mistake_of_the_drivers_own_is_no_agents_fault(tmp_path, monkeypatch):
    """The job ends with the error's name: the machine, stopped in the middle of an event, could handle no other."""
    handle = Machine.handle

    def mistaken(machine: Machine, now: float, event: events.Event) -> list[events.Action]:
        if isinstance(event, events.Ended):
            raise KeyError("a mistake")
        return handle(machine, now, event)

    monkeypatch.setattr(Machine, "handle", mistaken)
    end = pack_message("end", worker=0, code=1, killed=False, started=True)
    with pytest.raises(RuntimeError, match=r"the driver cannot act on Ended\(worker=0"):
        drive(tmp_path, {"a": [ready(), end]}, until="nothing")


@pytest.mark.parametrize("kind", ["joined", "done", "committed"])
def test_what_a_worker_says_without_a_world_is_refused(kind):
    with pytest.raises(WorkerMessageError, match="world = None"):
        check({"kind": kind})


def test_a_worker_at_the_gate_is_told_to_the_machine_as_it_says_it():
    build: Build = {"version": "1"}
    event = event_of(7, check(AT_THE_GATE | {"commit": 3, "world": 2}))
    assert (event.worker, event.commit, event.world, event.build) == (7, 3, 2, build)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("worker", "message", "text"),
    [
        (4, {"kind": "leaving"}, "no worker 4 runs here"),
        (3, AT_THE_GATE | {"stalled": None}, "it says 'ready' with stalled = None; install the same version"),
    ],
)
def test_an_agent_passes_on_what_its_own_workers_say_as_workers_do(worker, message, text):
    """An ended worker's descendant may use its number, and other versions of the engine may send other messages."""
    workers = Workers.__new__(Workers)
    workers._running = {3}
    passed: list[dict[str, Any]] = []
    channel = SimpleNamespace(send=lambda kind, **head: passed.append(head))
    workers._agent = SimpleNamespace(channel=channel)  # type: ignore[assignment]
    workers.worker_said(3, {"kind": "leaving"})
    with pytest.raises(StreamError, match=text):
        workers.worker_said(worker, message)
    assert passed == [{"worker": 3, "message": {"kind": "leaving"}}]
