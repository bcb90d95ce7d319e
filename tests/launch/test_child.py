"""Children whose start is not waited for, since the file system of their program may hang."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.quick

BEGIN = """
import errno, os, select, sys
from engine.launch.process.child import Child

def until_readable(descriptor):
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(30e3)

def start(program, prepare=lambda: None, *words):
    return Child((program, *words), program, {"NAME": "value"}, (1, 2), (), prepare)
"""


def run(text: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", BEGIN + text], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_a_child_that_cannot_begin_yet_keeps_nobody_waiting():
    assert run("""
reading, writing = os.pipe()
child = start("/bin/sh", lambda: os.read(reading, 1), "-c", "echo $NAME; exit 3")
assert child.read_failure() is None and child.poll() is None and child.started >= 0
os.write(writing, b".")
until_readable(child.started)
assert child.read_failure() is None and child.started < 0
assert child.wait(30.0) == 3
""") == ["value"]


def test_a_program_that_cannot_be_executed_is_told_later():
    run("""
child = start("/dev/null/none")
until_readable(child.started)
assert child.read_failure().errno == child.read_failure().errno == errno.ENOTDIR
assert child.wait(30.0) == 127
try:
    start("/nowhere").await_start()
except FileNotFoundError:
    pass
else:
    raise AssertionError
def fail(): raise ValueError
child = start("/bin/true", fail)
until_readable(child.started)
assert "could not be prepared" in str(child.read_failure())
""")


def test_a_child_has_none_of_our_descriptors_and_no_handler():
    assert run("""
import signal
signal.signal(signal.SIGUSR1, lambda *_: None)
os.set_inheritable(os.open("/dev/null", os.O_RDONLY), True)
child = start("/bin/sh", lambda: None, "-c", "ls /proc/$$/fd; kill -USR1 $$")
assert child.wait(30.0) == -signal.SIGUSR1
""")[:3] == ["0", "1", "2"]
