"""The relay that keeps leases while the driver is blocked: by itself, and in jobs with a frozen file system."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from engine.host import processes
from engine.launch.hosts import lease_renewal
from engine.launch.hosts.channel import Channel, Message
from engine.launch.hosts.lease_renewal import HIGH, LeaseRenewer

from ..launch.conftest import launcher as launcher
from ..waiting import let_pass, until
from .elastic_jobs import Elastic, worlds
from .elastic_jobs import job as job
from .test_agents import TWO_HOSTS


class Agent:
    """Agent's end of a relayed channel."""

    def __init__(self, relay: LeaseRenewer) -> None:
        from_driver, to_agent = os.pipe()
        from_agent, to_driver = os.pipe()
        self.driver = Channel(from_agent, to_agent)
        relay.add_channel(self.driver)
        self.channel = Channel(from_driver, to_driver)
        self.heard: list[Message] = []

    def kinds(self) -> list[str]:
        self.channel.out.write_available()
        if not self.channel.ended:
            self.heard.extend(self.channel.receive())
        return [message.kind for message in self.heard]


@pytest.fixture
def agent() -> Iterator[Agent]:
    with closing(LeaseRenewer(0.02)) as relay:
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
    assert next(each for each in agent.heard if each.kind == "heard").get_seconds("at") == 7.5
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
        agent.channel.out.write_available()
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
    """The relay uses only the pipe functions of `os`, and only the launcher's modules that read and write pipes."""
    tree = ast.parse(Path(lease_renewal.__file__).read_text())
    imported = {
        alias.name if isinstance(node, ast.Import) else f"{node.module or ''}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    names = ("LENGTHS", "READ_BYTES", "Channel", "ChannelError", "Decoder", "Message", "pack_message")
    allowed = {
        "contextlib",
        "os",
        "select",
        "threading",
        "time",
        "collections.abc.Callable",
        "process.outgoing.Outgoing",
    }
    allowed |= {"__future__.annotations", "net.frames", "host.sockets.is_short"}
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
    while not t.stopped:
        with open(HERE / f"beats.{t.rank}", "a") as file: file.write(".")
        print("x" * 1000, flush=True)
        let_pass(0.05)
        t.step()
"""
# Thaws and unmounts as soon as its input is closed, even if the test run was killed. A time limit applies in any case:
# a process that has touched the frozen file system cannot be killed.
GUARD = 'timeout 240 cat > /dev/null; fsfreeze -u "$0" 2> /dev/null; umount -l "$0"'


class Frozen:
    """A file system that can be frozen, with the log and the output directory of a job."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def start(self, job: Elastic, *options: object) -> subprocess.Popen[bytes]:
        """Start a job whose discovery script is on that file system; return when two workers train."""
        script = job.home / "hosts.sh"
        script.write_text(f"#!/bin/sh\necho x >> {self.place}/asked\necho a:1\necho b:1\n")
        script.chmod(0o700)
        reach = ("-np", 2, "--min-np", 1, *TWO_HOSTS[2:], "--host-discovery-script", script)
        words = [*job.launcher.command, *reach, "--output-dir", self.place / "out", *options]
        job.errors = self.place / "errors"
        with job.errors.open("wb") as log:
            program = job.program(TALKS)
            process = job.launcher.start_command(
                [*map(str, words), sys.executable, str(program)], stdout=log, stderr=log
            )
        self.beats = [job.home / f"beats.{rank}" for rank in range(2)]
        until(lambda: all(path.exists() for path in self.beats), "both train")
        return process

    def freeze(self) -> None:
        subprocess.run(["fsfreeze", "-f", str(self.place)], check=True, timeout=60)

    def thaw(self) -> None:
        subprocess.run(["fsfreeze", "-u", str(self.place)], check=True, timeout=60)

    def both_go_on(self) -> None:
        before = [path.stat().st_size for path in self.beats]
        until(
            lambda: all(path.stat().st_size > size for path, size in zip(self.beats, before, strict=True)),
            "both go on",
        )


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[Frozen]:
    image, place = tmp_path / "image", tmp_path / "frozen"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    for command in (["mkfs.ext4", "-q", "-F", str(image)], ["mount", "-o", "loop", str(image), str(place)]):
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"needs root, mkfs.ext4 and loop devices: {error}")
    guard = subprocess.Popen(["sh", "-c", GUARD, str(place)], stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield Frozen(place)
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        assert guard.wait(60) == 0


def test_what_is_written_while_a_file_system_stands_still_is_there_later(job, frozen):
    """The file system is frozen for two leases; the discovery script waits there, too, so that nothing can kill it."""
    process = frozen.start(job, "--lease", 2)
    frozen.freeze()
    let_pass(5.0)
    frozen.both_go_on()
    frozen.thaw()
    done = job.finish(process)
    assert done.code == 0, done.err
    assert worlds(done) == ["1: 2 ranks"]
    for rank in range(2):
        written = b"x" * 1000 + b"\n"
        count = frozen.beats[rank].stat().st_size
        assert (frozen.place / f"out/rank.{rank}/stdout").read_bytes().count(written) == count
        assert done.err.count(f"[{rank}]<stdout>:{'x' * 1000}\n") == count


@pytest.mark.slow
def test_a_signal_ends_the_workers_of_a_job_whose_log_stands_still(job, frozen):
    process = frozen.start(job, "--grace-period", 1)
    workers = [job.pid(0), job.pid(1)]
    frozen.freeze()
    let_pass(1.0)  # the launcher writes meanwhile
    process.send_signal(signal.SIGTERM)
    until(
        lambda: not any(processes.read_process(pid) for pid in workers),
        "no worker runs, and the log still stands still",
    )
    frozen.thaw()
    done = job.wait(process)
    assert done.code == 128 + signal.SIGTERM, done.err
    assert "ended by SIGTERM" in done.err


@pytest.mark.slow
def test_half_a_minute_without_log_and_output_directory_costs_no_worker(job, frozen):
    """Leases have their default length; a worker's death is noticed meanwhile, and the others go on."""
    process = frozen.start(job)
    frozen.freeze()
    let_pass(30.0)
    frozen.both_go_on()
    os.kill(job.pid(1), signal.SIGKILL)
    job.world(2, 1)  # the death is noticed, and the other worker goes on
    frozen.thaw()
    job.world(3, 2)
    done = job.finish(process)
    assert done.code == 0, done.err
    assert worlds(done)[0] == "1: 2 ranks"
    assert "cannot be killed" in done.err


UNKILLABLE = """
from tests.waiting import let_pass
place = pathlib.Path(sys.argv[1])
touch(f"ready.{rank}")
wait_for("stands still")
if rank == 1:
    touch("about to write")
    (place / "written").write_text("x")
wait_for("about to write")
let_pass(0.5)  # the write has begun by then
sys.exit(3)
"""


@pytest.mark.slow
def test_a_rank_that_waits_in_the_kernel_holds_up_no_end_of_a_fixed_job(job, frozen):
    """A process in an uninterruptible wait does not end, even by SIGKILL."""
    launcher = job.launcher
    words = ["-np", "2", "--grace-period", "1", sys.executable, launcher.script(UNKILLABLE), str(frozen.place)]
    process = launcher.start_command([*launcher.command, *words])
    until(lambda: all((job.home / f"ready.{rank}").exists() for rank in range(2)), "both run")
    frozen.freeze()
    (job.home / "stands still").touch()
    done = launcher.finish(process)
    assert done.code == 3, done.err
    assert "rank 1 (pid" in done.err and "cannot be killed" in done.err
    frozen.thaw()
