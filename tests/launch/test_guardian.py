"""The guardian: its input, and its dismissal."""

from __future__ import annotations

import subprocess
import sys

from engine.launch.process.guardian import _GuardianInput

from ..waiting import until


def test_what_comes_in_parts_is_understood_once_it_is_whole():
    """A read may end within a line; half the number of a process group would be that of another."""
    told = _GuardianInput()
    text = b"".join(b"+%d\n" % group for group in range(1000, 3000)) + b"-1000\n=12.500\n"
    renewals = []
    for start in range(0, len(text), 4096):
        renewals += told.parse_part(text[start : start + 4096])
        assert min(told.groups) >= 1000
    assert (told.groups, renewals, told.dismissed) == (set(range(1001, 3000)), [12.5], False)
    assert told.parse_part(b".") == [] and not told.dismissed
    told.parse_part(b"\n")
    assert told.dismissed


DISMISSING = """
import signal
from engine.launch.process.guardian import Guardian
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
guardian = Guardian("a job of nobody", lambda: None)
guardian.watch_group(2**22)
guardian.stop()
print("dismissed")
"""


def test_a_guardian_that_the_kernel_reaps_is_dismissed_as_well():
    """Some shells and container runtimes ignore SIGCHLD from the start, so that waiting finds no child."""
    done = subprocess.run([sys.executable, "-c", DISMISSING], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("dismissed\n", "")


STOPPED = """
import os, signal, time
from engine.launch.process.guardian import Guardian
guardian = Guardian("a job of nobody", lambda: None)
os.kill(guardian.pid, signal.SIGSTOP)
begun = time.monotonic()
guardian.stop()
print("dismissed", time.monotonic() - begun < 30.0)
"""


def test_a_guardian_that_is_stopped_holds_up_no_end_of_a_job():
    done = subprocess.run([sys.executable, "-c", STOPPED], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("dismissed True\n", "")


BROKEN = """
import sys
from engine.launch.cli import main
from engine.launch.metrics import Metrics

def start(self, loop):
    raise ZeroDivisionError("a fault of the launcher")

Metrics.start = start
sys.exit(main(["-np", "2", "sh", "-c", "sleep 3917 & wait"]))
"""


def test_a_fault_of_the_launcher_leaves_no_process_of_a_rank():
    """Not even a child of one, which the end of its rank does not end."""
    done = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "a fault of the launcher" in done.stderr
    until(lambda: subprocess.run(["pgrep", "-f", "sleep 3917"], stdout=subprocess.DEVNULL).returncode == 1, "all ended")
