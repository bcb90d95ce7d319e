"""Containers and other users: namespaces, odd mounts, no home, no writable directory."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from .strange_machines import DONE, JOB, LAUNCH, Machine, lines, obstacle

OBSTACLE = obstacle("unshare", "setpriv", "mount", "prlimit")
pytestmark = pytest.mark.skipif(bool(OBSTACLE), reason=OBSTACLE or "-")
NOBODY = 65534
# A user who may only read root's files; the capability bit makes access(2) agree.
AS_NOBODY = ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", "--inh-caps=+dac_read_search"]
AS_NOBODY += ["--ambient-caps=+dac_read_search", "--no-new-privs", "--securebits=+no_setuid_fixup"]
# Odd names in the list of mounts: empty, in no encoding, with line ends for `str.splitlines`, with blanks.
ODD = [b"Schl\xfcssel", "ü\x0b\x1c\x85\u2028".encode(), b"a - b\n"]
# The usual locale of containers, without Python's coercion to UTF-8.
POSIX = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def inside(setup: bytes, *commands: list[object]) -> list[object]:
    """Build a command that runs others in new PID and mount namespaces, after `setup`."""
    shown = [" ".join(shlex.quote(str(part)) for part in command).encode() for command in commands]
    script = b"set -e\n" + setup + b"\n" + b"\n".join(shown) + b"\n"
    return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script]


def test_a_container_of_another_user_with_odd_mounts(machine: Machine) -> None:
    # /proc hides other users' processes from this user.
    setup = b"mount -t proc -o hidepid=2 proc /proc\n"
    for number, name in enumerate(ODD):
        (machine.home / str(number)).mkdir()
        place = os.fsencode(machine.home) + b"/%d/" % number + name
        setup += b"mkdir '%s'; mount -t tmpfs '%s' '%s'\n" % (place, name if number else b"", place)
    output = machine.home / "output"
    output.mkdir()
    os.chown(output, NOBODY, NOBODY)
    setup += b"unset HOME XDG_CACHE_HOME\n"
    run = machine.run(
        inside(
            setup,
            [*AS_NOBODY, sys.executable, JOB],
            [*AS_NOBODY, *LAUNCH, "--summary", "--output-dir", output, sys.executable, JOB],
        ),
        env=POSIX,
    )
    assert lines(run) == DONE
    assert "rank 0 of 1 is done" in run.stdout
    assert "collectives" in run.stderr, run.stderr  # the summary needs pages that ranks have found in /proc
    assert (output / "rank.1/stdout").stat().st_uid == NOBODY


def test_a_proc_of_another_name_space_is_said(machine: Machine) -> None:
    run = machine.run(inside(b"", [sys.executable, JOB], [*LAUNCH, sys.executable, JOB]))
    assert run.returncode == 2
    assert run.stdout == "rank 0 of 1 is done\n"  # a single rank needs no /proc
    assert run.stderr.startswith("enginerun: error: /proc does not show the processes of this job"), run.stderr


def test_nothing_can_be_written_but_the_output_directory(machine: Machine) -> None:
    (machine.home / "out").mkdir()
    setup = b"mount -t proc proc /proc\n"
    setup += f"mount --bind {shlex.quote(str(machine.home / 'out'))} /mnt\n".encode()
    setup += f"cp -r {shlex.quote(str(machine.site))} {shlex.quote(str(JOB))} /mnt\n".encode()
    # The directory becomes read-only, but stays readable for the interpreter and the sources.
    setup += b"for each in /tmp /var/tmp /root /dev/shm; do\n"
    setup += b"mount --bind $each $each; mount -o remount,bind,ro $each; done\n"
    setup += b'cd /tmp; export HOME=/tmp TMPDIR=/tmp PYTHONPATH="/mnt/$SITE"\n'
    python = sys.executable
    job = f"/mnt/{JOB.name}"
    setup += b"%s -m engine.launch -np 2 true && exit 9 || [ $? = 2 ]\n" % shlex.quote(python).encode()
    run = machine.run(
        inside(setup, [python, job], [*LAUNCH, "--output-dir", "/mnt/kept", python, job]),
        env={"SITE": machine.site.name},
    )
    assert lines(run) == DONE
    assert "no directory for the job's files" in run.stderr and "choose one with --output-dir" in run.stderr
    assert "Traceback" not in run.stderr
    assert (machine.home / "out/kept/rank.0/stdout").read_text() == DONE[0] + "\n"


def test_full_file_systems_and_next_to_no_shared_memory(machine: Machine) -> None:
    full = machine.home / "full"
    full.mkdir()
    setup = b"mount -t proc proc /proc; mount -t tmpfs -o size=4k tmpfs /dev/shm\n"
    setup += f"mount -t tmpfs -o size=64k tmpfs {shlex.quote(str(full))}; cd {shlex.quote(str(full))}\n".encode()
    setup += b"head -c 100000 /dev/zero > everything 2> /dev/null || true\n"
    options = ["--output-dir", "out", "--timeline", "t.json", "--autotune", "--autotune-log-file", "log.jsonl"]
    # Files that cannot be written are reported, and training goes on.
    run = machine.run(inside(setup, [*LAUNCH, *options, sys.executable, JOB]), env={"TMPDIR": str(full)})
    assert lines(run) == DONE
    for rank in range(2):
        assert f"out/rank.{rank}/stdout is not complete: No space left on device" in run.stderr, run.stderr
        assert f"t.rank{rank}.json ends here: [Errno 28] No space left on device" in run.stderr, run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("count", [4, 5])  # too few for the second rank, or for a thread of the launcher
def test_too_few_processes_are_an_error_that_says_so(machine: Machine, count: int) -> None:
    # A user without other processes here, since the limit counts all processes and threads of a user.
    user = [str(47_110 + count) if part == NOBODY else part for part in AS_NOBODY]
    run = machine.run([*user, "prlimit", f"--nproc={count}", *LAUNCH, sys.executable, JOB], cwd=Path("/"))
    assert run.returncode == 2, run.stderr
    assert run.stderr.rstrip("\n").split("\n")[-1].startswith("enginerun: error: "), run.stderr
    assert "ulimit -u" in run.stderr and "Traceback" not in run.stderr
