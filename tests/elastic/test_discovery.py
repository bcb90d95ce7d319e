"""Calls of a host discovery script that cannot be started, or cannot be killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing

import pytest

from engine.launch.elastic.discovery import Script
from engine.launch.errors import LaunchError
from engine.launch.hosts.host_list import MOST_SLOTS, is_here, parse_hosts, read_discovered
from engine.launch.process.reader_loop import ReaderLoop

from ..waiting import until


@pytest.fixture
def loop() -> Iterator[ReaderLoop]:
    with closing(ReaderLoop()) as loop:
        yield loop


def test_without_room_for_an_answer_the_script_cannot_be_started(monkeypatch, loop):
    def refuse(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    question = Script(["true"], 1, loop, print)
    with pytest.raises(LaunchError, match="it cannot be started: No space left on device"):
        until(lambda: question.poll_hosts(0.0), "the answer")
    question.close()


def test_an_answer_wakes_whoever_waits_for_it(loop):
    question = Script(["echo", "a:2"], 1, loop, print)
    assert question.poll_hosts(0.0) is None
    loop.step(60.0)  # until the loop is woken
    assert question.poll_hosts(0.1) == {"a": 2}
    assert question.poll_hosts(0.2) is None, "nothing is new"
    question.close()


def test_a_script_that_cannot_be_killed_is_not_waited_for(tmp_path, loop):
    """A tracer keeps the script from being reaped, like an uninterruptible wait; the next call comes after its end."""
    asked = tmp_path / "asked"
    script = [
        sys.executable,
        "-c",
        f"import os, signal; open({str(asked)!r}, 'a').write(f'{{os.getpid()}}\\n'); signal.pause()",
    ]
    lines: list[str] = []
    question = Script(script, 1, loop, lines.append, deadline=5.0)
    question._answer = {"a": 1}
    question.poll_hosts(0.0)
    pid = int(until(lambda: asked.exists() and asked.read_text(), "the script runs"))
    tracer = subprocess.Popen([sys.executable, "-c", TRACER, str(pid)], stdout=subprocess.PIPE)
    try:
        assert tracer.stdout is not None and tracer.stdout.readline() == b"traced\n"
        assert question.poll_hosts(6.0) is None
        assert lines == ["the host discovery script fails, its last answer counts: it has not answered within 5 s"]
        assert question.poll_hosts(8.0) is None and question.poll_hosts(9.0) is None
        assert lines[1:] == [
            f"the host discovery script cannot be killed (process {pid}): it waits in the kernel, as for a file system "
            "that stands still; it is asked again when it has ended"
        ]
    finally:
        tracer.kill()
        tracer.wait(10)
    until(lambda: question.poll_hosts(10.0) is None and asked.read_text().count("\n") == 2, "the script is asked again")
    question.close()


def test_a_script_that_names_no_interpreter_is_run_by_the_shell(tmp_path, loop):
    script = tmp_path / "hosts"
    script.write_text('echo "a:2"\n')
    script.chmod(0o700)
    question = Script([str(script)], 1, loop, print)
    question.poll_hosts(0.0)
    loop.step(60.0)  # until the script has ended
    assert question.poll_hosts(0.5) == {"a": 2}


TRACER = """
import ctypes, signal, sys
assert ctypes.CDLL(None).ptrace(0x4206, int(sys.argv[1]), 0, 0) == 0  # PTRACE_SEIZE
print("traced", flush=True)
signal.pause()  # whoever traces it reaps it first
"""


@pytest.mark.parametrize("digits", [12, 5000])
def test_absurd_slots_are_bounded_where_they_are_read(digits):
    text = "9" * digits
    assert read_discovered(f"h2:{text}", 1) == {"h2": MOST_SLOTS}
    with pytest.raises(LaunchError, match="at least one slot"):
        parse_hosts(f"h2:{text}")


@pytest.mark.parametrize("name", ["LOCALHOST", "LocalHost.", "NODE1", "node1.", "127.0.0.1"])
def test_names_of_this_machine_are_compared_as_name_servers_do(name):
    assert is_here(name, {"Node1"})
