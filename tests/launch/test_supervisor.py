"""The supervisor of ranks, with a guardian that only takes note."""

from __future__ import annotations

import subprocess
import sys

GROUPS = """
import os, signal, sys
from pathlib import Path
from engine.host import processes
from engine.host.signals import caught
from engine.launch import spawn
from engine.launch.output import Stream
from engine.launch.plan import RankPlan
from engine.launch.supervisor import SIGNALS, Supervisor

class Guardian:
    def watch(self, group): print("watch", flush=True)
    def forget(self, group):
        print("forget", flush=True)
        supervisor.release()

processes.prctl(processes.PR_SET_CHILD_SUBREAPER, 1)
with caught(SIGNALS, lambda *_: None) as wakeup:
    supervisor = Supervisor(Guardian(), wakeup, (), 1.0, print)
    supervisor.hold()
    # The rank ends at once; its child, of the same group, when nobody can write to it any more.
    plan = RankPlan(0, dict(os.environ), None, Path.cwd())
    reading, writing = os.pipe()
    os.set_inheritable(reading, True)
    command = ["sh", "-c", f"(read line <&{reading}) & exit 0"]
    rank = spawn.start(plan, command, "/bin/sh", (1024, 1024), [reading])
    os.close(reading)
    supervisor._tell_end = lambda rank, end: (print("ended", flush=True), os.close(writing))
    supervisor.add(rank)
    for descriptor in (rank.stdout, rank.stderr):
        os.close(descriptor)
    supervisor.run()
"""


def test_a_group_whose_last_process_ends_after_its_rank_is_forgotten():
    """Its number may come to mean other processes of the user, which the end of the job must not kill."""
    done = subprocess.run([sys.executable, "-c", GROUPS], capture_output=True, text=True, timeout=30)
    assert (done.stdout.split(), done.stderr) == (["watch", "ended", "forget"], "")
