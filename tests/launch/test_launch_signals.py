"""Signals reach the ranks, and no process is left, whatever happens."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import signal
import subprocess
import termios
from pathlib import Path

import pytest

from ..waiting import marked, until
from .launch_jobs import DEADLINE, Launcher

GUARDIAN = "enginerun-guard"
GRANDCHILDREN = """
subprocess.Popen(["sleep", "600"])
subprocess.Popen(["sleep", "600"], start_new_session=True)
subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600 & exit 0"], start_new_session=True).wait()
"""


def name_of(pid: int) -> str:
    """Name of a process; empty if it is gone, or has ended and is not yet reaped."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return "" if ") Z " in text else text.partition("(")[2].rpartition(")")[0]


def guardian_of(launcher: Launcher) -> int:
    """Process ID of the guardian, once it has renamed itself."""
    return until(lambda: [pid for pid in marked(launcher.mark) if name_of(pid) == GUARDIAN], "a guardian")[0]


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=["INT", "TERM", "HUP"]
)
def test_a_signal_to_end_is_passed_on_and_gives_the_code(launcher, signum, code):
    process = launcher.start(
        *("-np", 2, "--grace-period", 60),
        python=f"""
            def end(*_): touch(f"signal.{{rank}}"); sys.exit(0)
            signal.signal({int(signum)}, end); touch(f"up.{{rank}}")
            while True: signal.pause()
        """,
    )
    launcher.wait_for("up.0", "up.1")
    process.send_signal(signum)
    job = launcher.finish(process)
    assert job.code == code
    assert (launcher.home / "signal.0").exists()
    assert (launcher.home / "signal.1").exists()
    assert "first failure" not in job.err
    assert job.err.rstrip().endswith(f"ended by {signum.name}")


def test_ranks_that_die_of_the_signal_are_no_failure(launcher):
    process = launcher.start("-np", 2, python="touch(f'up.{rank}'); linger()")
    launcher.wait_for("up.0", "up.1")
    process.send_signal(signal.SIGINT)
    job = launcher.finish(process)
    assert job.code == 130
    assert "first failure" not in job.err


def test_after_the_grace_ranks_are_killed(launcher):
    process = launcher.start(
        "-np",
        2,
        "--grace-period",
        0.3,
        python="signal.signal(signal.SIGTERM, signal.SIG_IGN); touch(f'up.{rank}'); linger()",
    )
    launcher.wait_for("up.0", "up.1")
    process.send_signal(signal.SIGTERM)
    job = launcher.finish(process)
    assert job.code == 143
    assert "ranks 0, 1 did not end within the grace period after SIGTERM: SIGKILL" in job.err


def test_a_second_interrupt_kills_at_once(launcher):
    process = launcher.start(
        "-np",
        2,
        "--grace-period",
        600,
        python=GRANDCHILDREN
        + """
signal.signal(signal.SIGINT, lambda *_: touch(f"int.{rank}")); touch(f"up.{rank}")
while True: linger()
""",
    )
    launcher.wait_for("up.0", "up.1")
    process.send_signal(signal.SIGINT)
    launcher.wait_for("int.0", "int.1")
    process.send_signal(signal.SIGINT)
    assert launcher.finish(process).code == 130  # much sooner than the grace period ends


def test_ctrl_c_on_a_terminal_reaches_the_ranks_once(launcher):
    ours, theirs = pty.openpty()
    process = launcher.start(
        *("-np", 2, "--grace-period", 60),
        stdin=theirs,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, 0x540E, 0),  # TIOCSCTTY: its controlling terminal
        python="""
            def on_int(*_): open(here / f"ints.{rank}", "a").write("x"); sys.exit(0)
            signal.signal(signal.SIGINT, on_int); touch(f"up.{rank}")
            while True: signal.pause()
        """,
    )
    os.close(theirs)
    launcher.wait_for("up.0", "up.1")
    os.write(ours, b"\x03")
    assert process.wait(DEADLINE) == 130
    os.close(ours)
    assert [(launcher.home / f"ints.{rank}").read_text() for rank in (0, 1)] == ["x", "x"]


def test_ranks_that_share_a_processor_have_no_terminal(launcher):
    """They are in the launcher's session, where a background read of its terminal would stop them."""
    ours, theirs = pty.openpty()

    def prepare():
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    process = launcher.start(
        "-np",
        2,
        start_new_session=True,
        preexec_fn=prepare,
        python="""
            try:
                os.open("/dev/tty", os.O_RDWR)
                here.joinpath(f"terminal.{rank}").write_text("open")
            except OSError as error:
                here.joinpath(f"terminal.{rank}").write_text(f"{error.errno} {os.getsid(0)}")
        """,
    )
    os.close(theirs)
    assert launcher.finish(process).code == 0
    os.close(ours)
    expected = f"{errno.ENXIO} {process.pid}"
    assert [(launcher.home / f"terminal.{rank}").read_text() for rank in (0, 1)] == [expected] * 2


def test_usr1_reaches_ranks_that_handle_it_and_spares_those_that_do_not(launcher):
    process = launcher.start(
        "-np",
        3,
        python="""
            if rank == 2:  # as below a shell: the handler is in a child
                subprocess.run([sys.executable, __file__], env=os.environ | {"RANK": "9"})
                sys.exit(0)
            if rank != 1: signal.signal(signal.SIGUSR1, lambda *_: touch(f"usr1.{rank}"))
            touch(f"up.{rank}"); wait_for("end")
        """,
    )
    launcher.wait_for("up.0", "up.1", "up.9")
    process.send_signal(signal.SIGUSR1)
    launcher.wait_for("usr1.0", "usr1.9")
    (launcher.home / "end").touch()
    job = launcher.finish(process)
    assert job.code == 0
    assert "SIGUSR1: not passed on to rank 1, which would die of it" in job.err


def test_a_hangup_that_the_user_ignores_is_ignored(launcher):
    process = launcher.start(
        "-np",
        1,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        python="touch('up'); wait_for('end')",
    )
    launcher.wait_for("up")
    process.send_signal(signal.SIGHUP)
    (launcher.home / "end").touch()
    assert launcher.finish(process).code == 0


def test_a_job_that_went_well_leaves_no_process(launcher):
    job = launcher.run("-np", 2, python=GRANDCHILDREN)
    assert job.code == 0
    launcher.nothing_left()


def test_a_failed_job_leaves_no_process(launcher):
    job = launcher.run("-np", 2, "--grace-period", 0.2, python=GRANDCHILDREN + "if rank == 0: sys.exit(3)\nlinger()")
    assert job.code == 3
    launcher.nothing_left()


def test_killing_the_launcher_leaves_no_process(launcher):
    process = launcher.start(
        "-np",
        3,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        python=GRANDCHILDREN + "touch(f'up.{rank}'); linger()",
    )
    launcher.wait_for("up.0", "up.1", "up.2")
    assert len(marked(launcher.mark)) >= 3 * 5 + 2
    process.kill()
    process.wait()
    launcher.nothing_left()


def test_the_ranks_die_with_the_launcher_without_the_guardian_too(launcher):
    process = launcher.start(
        "-np",
        2,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        python="touch(f'up.{rank}'); linger()",
    )
    launcher.wait_for("up.0", "up.1")
    os.kill(guardian_of(launcher), signal.SIGKILL)
    process.kill()
    process.wait()
    launcher.nothing_left()


def test_a_job_goes_on_without_its_guardian(launcher):
    process = launcher.start("-np", 2, python="touch(f'up.{rank}'); wait_for('end')")
    launcher.wait_for("up.0", "up.1")
    os.kill(guardian_of(launcher), signal.SIGKILL)
    (launcher.home / "end").touch()
    assert launcher.finish(process).code == 0


def test_killing_the_launcher_ends_what_has_wiped_its_environment(launcher):
    process = launcher.start(
        "-np",
        1,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        python="""
            child = subprocess.Popen(["sleep", "600"], env={})
            (here / "pid").write_text(str(child.pid)); touch("up"); linger()
        """,
    )
    launcher.wait_for("up")
    child = int((launcher.home / "pid").read_text())
    assert name_of(child) == "sleep"
    process.kill()
    process.wait()
    until(lambda: name_of(child) != "sleep", "the grandchild's end")


def test_killing_the_launcher_while_it_starts_leaves_no_process(launcher):
    for _ in range(5):
        before = set(marked(launcher.mark))
        process = launcher.start(
            "-np", 8, "--quiet", "sleep", "600", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until(lambda: len(set(marked(launcher.mark)) - before) > 2, "some ranks")  # noqa: B023
        process.kill()
        process.wait()
        launcher.nothing_left()


def test_orphans_of_a_long_job_do_not_pile_up(launcher):
    process = launcher.start(
        "-np",
        1,
        python="""
            for _ in range(20): subprocess.run(["sh", "-c", "true & exit 0"])
            touch("up"); wait_for("end")
        """,
    )
    launcher.wait_for("up")

    def zombies() -> int:
        listing = subprocess.run(
            ["ps", "-o", "stat=", "--ppid", str(process.pid)], capture_output=True, text=True, check=True
        )
        return listing.stdout.count("Z")

    until(lambda: zombies() == 0, "no zombies")
    (launcher.home / "end").touch()
    assert launcher.finish(process).code == 0


def test_a_killed_rank_ends_the_job_soon(launcher):
    process = launcher.start(
        "-np",
        3,
        "--grace-period",
        0.2,
        python="(here / f'pid.{rank}').write_text(str(os.getpid())); touch(f'up.{rank}'); linger()",
    )
    launcher.wait_for("up.0", "up.1", "up.2")
    os.kill(int((launcher.home / "pid.1").read_text()), signal.SIGKILL)
    job = launcher.finish(process)
    assert job.code == 137
    assert "first failure: rank 1 " in job.failure[0]
    assert "other ranks: ranks 0, 2: ended by the launcher, killed by SIGTERM" in job.err
