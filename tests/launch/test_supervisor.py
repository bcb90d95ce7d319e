"""The supervisor of ranks, with a guardian that only records its input."""

from __future__ import annotations

import subprocess
import sys

from engine.host import processes

from ..waiting import until

GROUPS = """
import os, signal, sys
from pathlib import Path
from engine.host import processes
from engine.host.signals import catch_signals
from engine.launch.process import spawn
from engine.launch.process.output import Stream
from engine.launch.process.plan import RankPlan
from engine.launch.process.job_signals import SIGNALS
from engine.launch.process.reader_loop import ReaderLoop
from engine.launch.process.supervisor import Supervisor

class Guardian:
    def watch_group(self, group): print("watch", flush=True)
    def forget_group(self, group):
        print("forget", flush=True)
        supervisor.release()

processes.call_prctl(processes.PR_SET_CHILD_SUBREAPER, 1)
with catch_signals(SIGNALS, lambda *_: None) as wakeup:
    supervisor = Supervisor(ReaderLoop(), Guardian(), wakeup, 1.0, print)
    supervisor.hold_open()
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
    """Its number may be reused for other processes of the user, which the end of the job must not kill."""
    done = subprocess.run([sys.executable, "-c", GROUPS], capture_output=True, text=True, timeout=30)
    assert (done.stdout.split(), done.stderr) == (["watch", "ended", "forget"], "")


HELD = """
import os, subprocess, sys, time
from pathlib import Path
from engine.host import processes
from engine.host.signals import catch_signals
from engine.launch.process import spawn
from engine.launch.process.plan import RankPlan
from engine.launch.process.job_signals import SIGNALS
from engine.launch.process.reader_loop import ReaderLoop
from engine.launch.process.supervisor import Supervisor

TRACER = '''
import ctypes, signal, sys
assert ctypes.CDLL(None).ptrace(0x4206, int(sys.argv[1]), 0, 0) == 0  # PTRACE_SEIZE
print("traced", flush=True)
signal.pause()  # a debugger that does nothing with what it is told
'''

class Guardian:
    def watch_group(self, group): pass
    def forget_group(self, group): pass

with catch_signals(SIGNALS, lambda *_: None) as wakeup:
    supervisor = Supervisor(ReaderLoop(), Guardian(), wakeup, 1.0, print)
    plan = RankPlan(3, dict(os.environ), None, Path.cwd())
    reading, writing = os.pipe()
    command = ["sh", "-c", f"read line <&{reading}; exit 7"]
    rank = spawn.start(plan, command, "/bin/sh", (1024, 1024), [reading])
    supervisor.add(rank)
    tracer = subprocess.Popen([sys.executable, "-c", TRACER, str(rank.pid)], stdout=subprocess.PIPE)
    assert tracer.stdout.readline() == b"traced\\n"
    os.close(reading)
    os.close(writing)
    began = time.monotonic()
    try:
        outcome = supervisor.run()
    finally:
        tracer.kill()
    assert time.monotonic() - began < 20
    print([(end.rank, end.code) for end in outcome.ends], tracer.pid, rank.pid)
"""


def test_a_rank_that_has_ended_and_that_a_debugger_holds_is_not_waited_for():
    done = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    *said, last = done.stdout.splitlines()
    ends, tracer, pid = last.rsplit(" ", 2)
    assert ends == "[(3, 7)]"
    held = f"rank 3 (pid {pid}) has ended (exit code 7), and a debugger holds it ("
    assert [line for line in said if line.startswith(held) and line.endswith(f", pid {tracer}): it is not waited for")]


def test_a_process_whose_first_thread_has_ended_still_runs() -> None:
    """The kernel shows such a process as a zombie, while its other threads work on."""
    program = (
        "import ctypes, sys, threading\n"
        "threading.Thread(target=sys.stdin.read).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:

        def look() -> processes.Process:
            found = processes.read_process(process.pid)
            assert found is not None
            return found

        until(lambda: look().state == "Z", "the first thread has ended")
        assert processes.is_running(look())
        process.kill()
        until(lambda: not processes.is_running(look()), "all threads have ended")
