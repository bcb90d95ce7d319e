"""Elastic jobs of real processes without the engine's worlds: how the driver reacts when workers end."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from ..launch.conftest import launcher as launcher
from ..waiting import until
from .elastic_jobs import UNTIL_STOP, worlds
from .elastic_jobs import job as job


def test_a_job_without_trouble_is_as_any_other(job):
    done = job.run("-np", 2, "--min-np", 1, body="def body(t):\n    for _ in range(3): t.step()\n")
    assert done.code == 0, done.err
    assert worlds(done) == ["1: 2 ranks"]
    assert done.lines(0) == ["world 1 rank 0 of 2: the job begins"]
    assert job.launcher.kept() == []


@pytest.mark.slow
def test_the_launcher_has_descriptors_for_all_slots(job):
    """Each slot needs two files and a counters page: the soft limit of open files is raised for that."""
    program = job.program("def body(t): t.step()\n")
    limited = ["sh", "-c", 'ulimit -Sn 32; exec "$@"', "sh", *job.launcher.command, "-np", "8", "--min-np", "8"]
    done = job.wait(job.start_command([*limited, sys.executable, str(program)]))
    assert done.code == 0, done.err


def test_a_killed_worker_is_replaced_and_the_others_go_on(job):
    """The survivor keeps its process; the newcomer has another number and the same slot."""
    process = job.start("-np", 2, "--min-np", 1)
    job.world(1, 2)
    survivor = job.pid(0)
    os.kill(job.pid(1), signal.SIGKILL)
    job.world(3, 2)
    assert job.pid(0) == survivor
    done = job.finish(process)
    assert done.code == 0, done.err
    assert worlds(done) == [
        "1: 2 ranks",
        "2: 1 rank, because rank 1 (worker 1 on localhost) was killed by SIGKILL",
        "3: 2 ranks, because there are newcomers",
    ]
    assert done.lines(1)[-1].startswith("world 3 rank 1 of 2")
    assert "enginerun: the job had 2 resets" in done.err


@pytest.mark.slow
def test_output_goes_by_slot_and_is_kept_over_workers(job, tmp_path):
    process = job.start("-np", 2, "--min-np", 1, "--output-dir", tmp_path / "out")
    job.world(1, 2)
    os.kill(job.pid(1), signal.SIGKILL)
    job.world(3, 2)
    job.finish(process)
    lines = (tmp_path / "out" / "rank.1" / "stdout").read_text().splitlines()
    assert [line.split(":")[0] for line in lines] == ["world 1 rank 1 of 2", "world 3 rank 1 of 2"]


def test_below_the_minimum_survivors_wait_for_the_newcomer(job):
    """No smaller world is formed; the newcomer comes, and the survivor goes on with it."""
    process = job.start("-np", 2, "--min-np", 2, "--max-np", 3)
    job.world(1, 2)
    os.kill(job.pid(0), signal.SIGKILL)
    job.world(2, 2)
    done = job.finish(process)
    assert done.code == 0, done.err
    assert worlds(done)[1] == "2: 2 ranks, because rank 0 (worker 0 on localhost) was killed by SIGKILL"


def test_below_the_minimum_for_too_long_is_the_end_with_the_first_cause(job):
    """The survivor is told and may save; the exit code is that of the first failure."""
    process = job.start(
        *("-np", 2, "--min-np", 2, "--elastic-timeout", 10, "--blacklist-cooldown-range", 60, 60),
        body="if there('broken') and os.environ['ENGINE_SLOT'] == '1': sys.exit(7)\n" + UNTIL_STOP,
        after="touch(f'saved.{t.worker}')",
    )
    job.world(1, 2)
    (job.home / "broken").touch()
    os.kill(job.pid(1), signal.SIGKILL)
    done = job.wait(process)
    assert done.code == 128 + signal.SIGKILL
    assert (job.home / "saved.0").exists()
    assert done.failure[0].startswith(
        "enginerun: first failure: worker 1 in slot 1 of localhost: was killed by SIGKILL"
    )
    assert "The job ends: for 10 s there were too few workers" in done.err


def test_a_script_tells_of_more_slots_and_of_fewer(job):
    """A job grows, shrinks, and survives a failing script; the order of the script's lines has no meaning."""
    (job.home / "hosts").write_text("localhost:1\n")
    script = "sh -c 'test -e hosts && cat hosts'"
    process = job.start("-np", 1, "--max-np", 2, "--host-discovery-script", script)
    job.world(1, 1)
    replace_text(job.home / "hosts", "127.0.0.1\nlocalhost:1\n")
    job.world(2, 2)
    replace_text(job.home / "hosts", "\nlocalhost:1\n127.0.0.1:1\n")  # the same slots
    (job.home / "hosts").rename(job.home / "away")
    assert until(lambda: "its last answer counts" in job.said(), "a line")
    replace_text(job.home / "hosts", "localhost:1\n")
    job.world(3, 1)
    done = job.finish(process)
    assert done.code == 0, done.err
    assert worlds(done) == [
        "1: 1 rank",
        "2: 2 ranks, because there are newcomers",
        "3: 1 rank, because host localhost has 1 slots now",
    ]


@pytest.mark.slow
def test_each_change_of_the_hosts_is_told_once(job):
    """A host that is gone while its worker still runs is not reported again at the next change."""
    (job.home / "hosts").write_text("a:1\n")
    reach = ("--launch-agent", "env STAND_IN={host}", "--host-discovery-script", "cat hosts")
    process = job.start("-np", 1, "--max-np", 1, *reach)
    job.world(1, 1)
    for hosts in ("b:1\n", "b:1\nc:1\n", "b:1\n"):
        before = job.said().count("the hosts have changed")
        replace_text(job.home / "hosts", hosts)
        until(lambda before=before: job.said().count("the hosts have changed") > before, f"{hosts!r} is told")
    done = job.finish(process)
    assert done.code == 0, done.err
    told = [line.partition("the hosts have changed: ")[2] for line in done.err.splitlines() if "hosts have" in line]
    assert told == ["b is new, with 1 slot; a is gone", "c is new, with 1 slot", "c is gone"]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("false", "'false' tells no hosts: exit code 1"),
        ("./nothing-here", "it cannot be started: No such file"),
        ("echo a:b", "it printed 'a:b', and 'name:slots' or 'name' is expected"),
    ],
)
def test_a_script_that_fails_at_first_is_the_end(job, script, said):
    done = job.run("-np", 1, "--host-discovery-script", script)
    assert done.code == 2 and said in done.err


@pytest.mark.slow
def test_a_slot_that_fails_again_and_again_blacklists_its_host(job):
    """Failures of one slot do not stop the others' training, but no more workers are started on its host."""
    process = job.start(
        *("-np", 1, "--max-np", 2, "--slots-per-host", 2),
        body="if os.environ['ENGINE_SLOT'] == '1': touch(f'bad.{os.environ[\"ENGINE_WORKER\"]}'); sys.exit(5)\n"
        + UNTIL_STOP,
    )
    job.world(1, 1)
    until(lambda: "is blacklisted" in job.said(), "the host is blacklisted")
    done = job.finish(process)
    assert done.code == 0, done.err
    assert len(list(job.home.glob("bad.*"))) == 3
    assert worlds(done) == ["1: 1 rank"]


def test_a_program_that_is_not_elastic_is_told_so(job):
    done = job.launcher.run("-np", 1, "--min-np", 1, "--max-np", 2, "true")
    assert done.code == 1
    assert "ended with exit code 0, and never came to elastic.run" in done.failure[0]
    assert "another try would do the same" in done.err


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ([sys.executable, "nosuch.py"], 2, "can't open file"),
        ([sys.executable, "-m", "nosuch"], 1, "No module named nosuch"),
        (["sh", "-c", "nosuch"], 127, "not found"),
        (["./no_interpreter"], 127, "the interpreter in its first line"),
    ],
    ids=["no file", "no module", "no command", "no interpreter"],
)
def test_a_program_that_is_not_there_is_tried_once_in_each_slot(job, command, code, said):
    """A missing program is a permanent error: the job ends at the first failure."""
    script = job.home / "no_interpreter"
    script.write_text("#!/nowhere/to/be/found\n")
    script.chmod(0o755)
    done = job.wait(job.start_command([*job.launcher.command, "-np", "2", "--min-np", "2", *command]))
    assert done.code == code, done.err
    tries = [line for line in done.err.splitlines() if said in line and line.startswith(("[", "enginerun: localhost"))]
    assert 1 <= len(tries) <= 2
    assert "The job ends: there is no such program to run" in done.err
    assert done.failure[0].startswith("enginerun: first failure: worker ")


def test_resets_have_a_limit(job):
    process = job.start("-np", 2, "--min-np", 1, "--reset-limit", 0)
    job.world(1, 2)
    os.kill(job.pid(1), signal.SIGKILL)
    done = job.wait(process)
    assert done.code == 128 + signal.SIGKILL
    assert "0 resets were allowed (reset_limit)" in done.err
    assert "  reset 1: worker 1 in slot 1 of localhost: was killed by SIGKILL" in done.err
    assert done.failure[0].startswith("enginerun: first failure: worker 1")


def test_an_error_of_the_program_ends_the_job_at_the_second_time(job):
    """The same exception at the same line, without a commit in between, is a permanent error."""
    done = job.run(
        *("-np", 2, "--min-np", 2),
        body="def body(t):\n    if t.rank == 1: raise ValueError('no such column')\n    while True: t.step()\n",
    )
    assert done.code == 1
    assert len(worlds(done)) == 2
    assert "worker 1 in slot 1 of localhost: ended with exit code 1" in done.failure[0]
    assert done.failure[-1] == "  | ValueError: no such column"
    assert "raised the same: ValueError in" in done.err


def test_a_death_before_the_last_barrier_costs_one_more_world(job):
    """All results arrive after one more reset; a late newcomer gets no world of its own."""
    done = job.run(
        *("-np", 2, "--min-np", 1),
        body="def body(t):\n    if t.commit < 3:\n        while t.commit < 3: t.step()\n"
        "    if t.world == 1 and t.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n",
        after="touch(f'result.{t.worker}')",
    )
    assert done.code == 0, done.err
    assert (job.home / "result.0").exists() and not (job.home / "result.1").exists()
    assert len(worlds(done)) == 2


def test_a_failure_after_the_last_barrier_is_the_jobs(job):
    """The training is complete, but a process fails afterwards: the job must not hide that."""
    done = job.run(
        *("-np", 2, "--min-np", 1),
        body="def body(t):\n    t.step()\n",
        after="if t.rank == 1: sys.exit(9)",
    )
    assert done.code == 9
    assert "first failure: worker 1 in slot 1 of localhost: ended with exit code 9" in done.failure[0]


def test_a_worker_that_is_told_to_go_loses_nothing(job):
    """SIGTERM to a worker: the others come to the gate at a commit, it may leave, and its slot is reused."""
    process = job.start("-np", 2, "--min-np", 1)
    job.world(1, 2)
    os.kill(job.pid(1), signal.SIGTERM)
    job.world(3, 2)
    done = job.finish(process)
    assert done.code == 0, done.err
    assert worlds(done)[1:] == [
        "2: 1 rank, because worker 1 in slot 1 of localhost has asked to leave",
        "3: 2 ranks, because there are newcomers",
    ]
    assert done.lines(1)[1] == "worker 1 is told: worker 1 in slot 1 of localhost has asked to leave"


@pytest.mark.slow
def test_what_a_worker_has_started_may_write_when_it_has_ended(job):
    late = "['sh', '-c', f'sleep 1; echo late; touch {HERE}/late']"
    after = f"""
import subprocess
from tests.waiting import until
if t.worker == 1:
    subprocess.Popen({late}, start_new_session=True)
else:
    until(lambda: there("late"), "what the other has started")
"""
    done = job.run("-np", 2, "--min-np", 1, body="def body(t): t.step()\n", after=after)
    assert done.code == 0, done.err
    assert done.lines(1)[-1] == "late"


def test_a_worker_that_stands_still_is_dead_before_the_others_go_on(job):
    """The worker is stopped for longer than the limits, and runs no line of the program when it is resumed."""
    process = job.start("-np", 2, "--min-np", 1, "--stall-check-shutdown-time-seconds", 1)
    job.world(1, 2)
    stopped = job.pid(1)
    os.kill(stopped, signal.SIGSTOP)
    job.world(2, 1)
    assert not os.path.exists(f"/proc/{stopped}")
    done = job.finish(process)
    assert done.code == 0, done.err
    assert worlds(done)[1].startswith("2: 1 rank, because")


@pytest.mark.parametrize("again", [False, True])
def test_a_signal_to_the_launcher_ends_the_job(job, again):
    """Like in any job, workers get the signal and a grace period, and are then killed."""
    process = job.start("-np", 2, "--min-np", 1, "--grace-period", 60 if again else 0.5)
    job.world(1, 2)
    process.send_signal(signal.SIGTERM)
    if again:
        until(lambda: "passed on to the ranks" in job.said(), "the first signal")
        process.send_signal(signal.SIGTERM)
    done = job.wait(process)
    assert done.code == 128 + signal.SIGTERM
    assert "enginerun: ended by SIGTERM" in done.err
    assert done.err.count("passed on to the ranks") == 1


def test_nothing_is_left_of_a_launcher_that_was_killed(job):
    process = job.start(
        *("-np", 2, "--min-np", 1), body="(HERE / 'gate').write_text(os.environ['ENGINE_GATE'])\n" + UNTIL_STOP
    )
    job.world(1, 2)
    process.kill()
    process.communicate(timeout=30)
    job.launcher.nothing_left()
    with open("/proc/net/unix") as sockets:
        assert (job.home / "gate").read_text() not in sockets.read()


def replace_text(path, text: str) -> None:
    """Replace a file's text atomically."""
    draft = path.with_name("draft")
    draft.write_text(text)
    draft.rename(path)
