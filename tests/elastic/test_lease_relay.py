"""What keeps leases while the driver stands still: the relay by itself, and jobs whose file system is frozen."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from engine.launch import lease_relay
from engine.launch.channel import Channel, Message
from engine.launch.lease_relay import HIGH, LeaseRelay

from ..launch.conftest import launcher as launcher
from ..waiting import let_pass, until
from .elastic_jobs import job as job
from .elastic_jobs import worlds
from .test_agents import TWO_HOSTS


class Agent:
    """The agent's end of a relayed channel."""

    def __init__(self, relay: LeaseRelay) -> None:
        from_driver, to_agent = os.pipe()
        from_agent, to_driver = os.pipe()
        self.driver = Channel(from_agent, to_agent)
        relay.take(self.driver)
        self.channel = Channel(from_driver, to_driver)
        self.heard: list[Message] = []

    def kinds(self) -> list[str]:
        self.channel.out.pump()
        if not self.channel.ended:
            self.heard.extend(self.channel.receive())
        return [message.kind for message in self.heard]


@pytest.fixture
def agent() -> Iterator[Agent]:
    with closing(LeaseRelay(0.02)) as relay:
        made = Agent(relay)
        made.relay = relay  # type: ignore[attr-defined]
        yield made
        made.channel.close()
        made.driver.close()


def test_beats_are_answered_though_the_driver_reads_and_writes_nothing(agent):
    agent.driver.send("start")
    until(lambda: agent.kinds().count("beat") > 3, "the relay sends the beat")
    agent.channel.send("beat", at=7.5)
    until(lambda: "heard" in agent.kinds(), "the answer")
    assert next(each for each in agent.heard if each.kind == "heard").seconds("at") == 7.5
    assert agent.relay.stop(agent.driver) is not None
    let_pass(0.1)
    agent.kinds()
    agent.heard.clear()
    agent.channel.send("beat", at=8.5)
    let_pass(0.3)
    assert "heard" not in agent.kinds(), "an agent that is given up is answered"
    assert [message.kind for message in agent.driver.receive()] == ["beat", "beat"]


def test_no_beat_comes_before_the_word_to_start(agent):
    agent.driver.send("prepare")
    until(lambda: agent.kinds() == ["prepare"], "the message")
    let_pass(0.1)
    assert agent.kinds() == ["prepare"]


def test_output_is_held_back_while_the_driver_reads_nothing(agent):
    agent.driver.send("start")
    until(lambda: "start" in agent.kinds(), "the word to start")
    body = bytes(1 << 20)
    for _ in range((HIGH >> 20) + 4):
        agent.channel.send("output", body)
    until(lambda: "hold" in agent.kinds(), "output is held back")
    assert "go_on" not in agent.kinds()
    taken: list[Message] = []

    def read() -> bool:
        agent.channel.out.pump()
        taken.extend(agent.driver.receive())
        return "go_on" in agent.kinds()

    until(read, "output comes again")
    until(lambda: read() and len(taken) == (HIGH >> 20) + 4, "all that was written")
    assert all(message.body == body for message in taken)


@pytest.mark.parametrize("side", ["driver", "agent"])
def test_the_end_of_one_side_is_the_end_of_the_other(agent, side):
    ends, sees = (agent.driver, agent.channel) if side == "driver" else (agent.channel, agent.driver)
    ends.send("last")
    ends.hang_up()
    heard: list[str] = []
    until(lambda: sees.ended or heard.extend(each.kind for each in sees.receive()) or sees.ended, "the end is seen")
    assert heard == ["last"]


def test_the_relay_calls_nothing_that_may_block_on_a_file_a_process_or_a_name():
    """Of `os` it uses pipes alone, and of the launcher's modules those that read and write them."""
    tree = ast.parse(Path(lease_relay.__file__).read_text())
    imported = {
        alias.name if isinstance(node, ast.Import) else f"{node.module or ''}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    names = ("LENGTHS", "READ_BYTES", "Channel", "ChannelError", "Decoder", "Message", "pack")
    allowed = {"contextlib", "os", "select", "threading", "time", "collections.abc.Callable", "outgoing.Outgoing"}
    allowed |= {"__future__.annotations", ".frames", "host.sockets.is_short"}
    assert imported <= allowed | {f"channel.{name}" for name in names}
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os"
    }
    assert used <= {"pipe2", "read", "write", "close", "O_CLOEXEC", "O_NONBLOCK"}
    assert not any(isinstance(node, ast.Call) and ast.unparse(node.func) == "open" for node in ast.walk(tree))


TALKS = """
from tests.waiting import let_pass
def body(t):
    t.step()
    while not there("stop"):
        with open(HERE / f"beats.{t.rank}", "a") as file: file.write(".")
        print("x" * 1000, flush=True)
        let_pass(0.02)
"""


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, which may be frozen and is thawed at the end."""
    image, place = tmp_path / "image", tmp_path / "frozen"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    for command in (["mkfs.ext4", "-q", "-F", str(image)], ["mount", "-o", "loop", str(image), str(place)]):
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"needs root, mkfs.ext4 and loop devices: {error}")
    yield place
    subprocess.run(["fsfreeze", "-u", str(place)], capture_output=True, timeout=60)
    subprocess.run(["umount", "-l", str(place)], check=True, timeout=60)


def test_a_frozen_file_system_of_log_and_output_costs_no_worker(job, frozen):
    """For four leases; the discovery script reads and writes there, too, so that nothing can kill it."""
    script = job.home / "hosts.sh"
    script.write_text(f"#!/bin/sh\necho x >> {frozen}/asked\necho a:1\necho b:1\n")
    script.chmod(0o700)
    options = ("-np", 2, "--min-np", 1, "--lease", 3, "--output-dir", frozen / "out", *TWO_HOSTS[2:])
    program = job.program(TALKS)
    words = [
        *job.launcher.command,
        *map(str, options),
        "--host-discovery-script",
        str(script),
        sys.executable,
        str(program),
    ]
    job.errors = frozen / "errors"
    with job.errors.open("wb") as log:
        process = job.launcher.start_command(words, stdout=log, stderr=log)
    beats = [job.home / f"beats.{rank}" for rank in range(2)]
    until(lambda: all(path.exists() for path in beats), "both train")
    subprocess.run(["fsfreeze", "-f", str(frozen)], check=True, timeout=60)
    try:
        let_pass(12.0)
        before = [path.stat().st_size for path in beats]
        until(lambda: all(path.stat().st_size > size for path, size in zip(beats, before, strict=True)), "both go on")
    finally:
        subprocess.run(["fsfreeze", "-u", str(frozen)], check=True, timeout=60)
    (job.home / "stop").touch()
    done = job.wait(process)
    assert done.code == 0, done.err
    assert worlds(done) == ["1: 2 ranks"]
