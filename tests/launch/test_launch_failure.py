"""The first cause of a failure is named, last on the screen, and its exit code is the job's."""

from __future__ import annotations

import json
import signal

import pytest

ENGINE_ERRORS = "from engine_ext.errors import RankDiedError, RankLeftError, RankStalledError\n"
# Ranks have time to end by themselves, however late they are: the launcher kills none of them.
LONG = ("--grace-period", 60)
PAUSE = 0.3  # seconds in which the monitor thread could write


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        ("sys.exit(3)", 3, "exit code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
        ("os.abort()", 134, "killed by SIGABRT"),
        ("raise ValueError('boom')", 1, "exit code 1"),
        ("os._exit(255)", 255, "exit code 255"),
    ],
)
def test_the_failing_rank_is_named_and_gives_the_code(launcher, ending, code, words):
    job = launcher.run("-np", 3, *LONG, python=f"if rank == 1: {ending}")
    assert job.code == code
    assert job.failure[0].startswith("enginerun: first failure: rank 1 on ")
    assert words in job.failure[0]
    assert "enginerun: other ranks: ranks 0, 2: exit code 0" in job.err


def test_the_report_is_last_and_has_the_end_of_stderr_and_the_traceback(launcher):
    job = launcher.run(
        "-np",
        2,
        python="""
            if rank == 1:
                for number in range(100): print("line", number, file=sys.stderr)
                def f(): raise ValueError("boom")
                f()
        """,
    )
    quoted = [line.removeprefix("  | ") for line in job.failure[1:]]
    assert len(quoted) == 20
    assert quoted[-1] == "ValueError: boom"
    assert quoted.count("Traceback (most recent call last):") == 1
    assert "line 99" in quoted
    assert all(line.startswith("  | ") for line in job.failure[1:])


def test_the_first_by_time_not_by_number(launcher):
    job = launcher.run(
        *("-np", 3, *LONG),
        python="""
            if rank == 2:
                (here / "draft").write_text(str(os.getpid())); os.rename(here / "draft", here / "pid"); sys.exit(5)
            if rank == 0:
                wait_for("pid")
                pid = (here / "pid").read_text()
                until(lambda: not os.path.exists(f"/proc/{pid}"))  # the launcher has reaped rank 2
                sys.exit(4)
        """,
    )
    assert job.code == 5
    assert "rank 2 " in job.failure[0]
    assert "rank 0: exit code 4" in job.err


def test_ranks_that_fail_because_of_another_are_not_the_cause(launcher):
    # Rank 1 ends only after both others have raised because of it: it is the last in time.
    job = launcher.run(
        *("-np", 3, *LONG),
        python=ENGINE_ERRORS
        + """
if rank == 1:
    pids = [int((wait_for(f"pid.{other}"), (here / f"pid.{other}").read_text())[1]) for other in (0, 2)]
    for pid in pids:
        until(lambda: not os.path.exists(f"/proc/{pid}"))
    os.kill(os.getpid(), signal.SIGKILL)
(here / f"tmp.{rank}").write_text(str(os.getpid())); os.rename(here / f"tmp.{rank}", here / f"pid.{rank}")
raise RankDiedError(f"rank 1 died (SIGKILL) while rank {rank} waited for 'fc.weight'", 1)
""",
    )
    assert job.code == 137
    assert "rank 1 " in job.failure[0]
    assert "killed by SIGKILL" in job.failure[0]
    assert "other ranks: ranks 0, 2: exit code 1, because of rank 1" in job.err


def test_a_stopped_rank_is_named_and_ended(launcher):
    job = launcher.run(
        *("-np", 3, "--grace-period", 2),
        python=ENGINE_ERRORS
        + """
(here / f"tmp.{rank}").write_text(str(os.getpid())); os.rename(here / f"tmp.{rank}", here / f"pid.{rank}")
wait_for("pid.0", "pid.1", "pid.2")
if rank == 2: os.kill(os.getpid(), signal.SIGSTOP)
stat = pathlib.Path("/proc", (here / "pid.2").read_text(), "stat")
until(lambda: stat.read_text().rpartition(") ")[2][0] == "T")
raise RankStalledError("rank 2 stood still for 10 s", 2)
""",
    )
    assert job.code == 1
    assert "first failure: rank 2 " in job.failure[0]
    assert "stood still; the launcher ended it" in job.failure[0]
    assert "rank 2 stood still for 10 s" in job.failure[0]
    assert ": SIGTERM" in job.err
    assert ": SIGKILL" not in job.err  # a stopped process reacts to no other signal, so it gets SIGKILL at once


@pytest.mark.slow
def test_a_rank_that_left_is_named_though_it_ended_well(launcher):
    job = launcher.run(
        *("-np", 2, *LONG),
        python=ENGINE_ERRORS
        + """
if rank == 1: touch("left"); sys.exit(0)
wait_for("left"); raise RankLeftError("rank 1 left while 'x' was needed", 1)
""",
    )
    assert job.code == 1
    assert "first failure: rank 1 " in job.failure[0]
    assert "left while others needed it, exit code 0" in job.failure[0]


def test_reports_of_the_engine_are_believed(launcher):
    job = launcher.run(
        *("-np", 3, "--grace-period", 2),
        python="""
            if rank == 1: linger()
            from engine.exit_report import writer
            writer.report_failure(1, "stalled", "rank 1 withheld 'x'", time.time())
            (pathlib.Path(os.environ["ENGINE_OUTPUT_DIR"]) / f"rank.{rank}" / "flight.json").write_text("{}")
            touch(f"wrote.{rank}"); wait_for("wrote.0", "wrote.2")  # the grace begins when the first of them ends
            sys.exit(4)
        """,
    )
    assert job.code == 4
    assert "first failure: rank 1 " in job.failure[0]
    assert "withheld 'x'" in job.failure[0]
    assert "ranks 0, 2: exit code 4, because of rank 1" in job.err
    [kept] = launcher.kept()
    assert f"flight records of ranks 0, 2: {kept}/rank.N/flight.json" in job.err
    assert json.loads((kept / "rank.0/exit.json").read_text())["failure"]["rank"] == 1


def test_the_rest_gets_a_grace_then_sigterm_then_sigkill(launcher):
    job = launcher.run(
        *("-np", 4, "--grace-period", 2),
        python="""
            def on_term(*_): touch(f"term.{rank}"); sys.exit(0)
            if rank == 1: signal.signal(signal.SIGTERM, on_term)
            if rank == 2: signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if rank == 3: touch("up.3"); wait_for("failed"); touch("ended"); sys.exit(0)
            if rank == 0: wait_for("up.1", "up.2", "up.3"); touch("failed"); sys.exit(9)
            touch(f"up.{rank}")
            while True: linger()
        """,
    )
    assert job.code == 9
    assert (launcher.home / "term.1").exists()
    assert (launcher.home / "ended").exists()
    assert "rank 1: ended by the launcher (exit code 0)" in job.err
    assert "rank 2: ended by the launcher, killed by SIGKILL" in job.err
    assert "rank 3: exit code 0" in job.err
    assert (
        "ranks 1, 2 did not end within the grace period after the first rank failed (rank 0, exit code 9): SIGTERM"
        in (job.err)
    )
    assert (
        "rank 2 did not end within the grace period after the first rank failed (rank 0, exit code 9): SIGKILL"
        in job.err
    )


def test_a_failed_job_keeps_its_directory_and_says_where(launcher):
    job = launcher.run("-np", 2, python="print('out', rank); sys.exit(rank)")
    [kept] = launcher.kept()
    assert f"each rank's stdout and stderr: {kept}/rank.N/" in job.err
    assert (kept / "rank.1/stdout").read_text() == "out 1\n"
    assert kept.stat().st_mode & 0o777 == 0o700


def test_a_job_that_went_well_leaves_no_directory(launcher):
    assert launcher.run("-np", 2, python="print('x')").code == 0
    assert launcher.kept() == []


def test_flight_records_of_a_job_that_went_well_are_kept(launcher):
    job = launcher.run(
        "-np", 2, python="if rank: pathlib.Path(os.environ['ENGINE_OUTPUT_DIR'], 'rank.1/flight.json').write_text('{}')"
    )
    assert job.code == 0
    [kept] = launcher.kept()
    assert f"flight records of rank 1: {kept}/rank.N/flight.json" in job.err


def test_a_rank_that_wrote_nothing_says_so(launcher):
    job = launcher.run("-np", 1, "false")
    assert job.code == 1
    assert job.failure[0].endswith("it wrote nothing to stderr")


ENGINE_JOB = """
import numpy, engine
engine.init()
engine.allreduce(numpy.ones(2), name="warm")
touch(f"up.{rank}")
"""


@pytest.mark.slow
def test_of_many_ranks_that_fail_because_of_one_its_traceback_alone_is_shown(launcher):
    job = launcher.run(
        *("-np", 3, *LONG),
        python=ENGINE_JOB
        + """
if rank == 2: raise ValueError("boom")
engine.allreduce(numpy.ones(2), name="x")
""",
    )
    [kept] = launcher.kept()
    assert job.err.count("[2]<stderr>:Traceback (most recent call last):") == 1
    for rank in (0, 1):
        path = kept / f"rank.{rank}" / "traceback.txt"
        cause, own = job.lines(rank, "stderr")
        assert "rank 2 failed: ValueError: boom at rank.py:" in cause, job
        assert own.startswith("RankRaisedError at rank.py:") and own.endswith(f"(its traceback: {path})")
        assert path.read_text().startswith("Traceback (most recent call last):")
    assert "first failure: rank 2 " in job.failure[0]


def test_an_interrupted_job_shows_no_traceback_of_every_rank(launcher):
    program = ENGINE_JOB + "engine.allreduce(numpy.ones(2), name=str(rank))"
    process = launcher.start("-np", 2, *LONG, python=program)
    launcher.wait_for("up.0", "up.1")
    process.send_signal(signal.SIGINT)
    job = launcher.finish(process)
    assert job.code == 130 and "Traceback" not in job.err, job
    for rank in (0, 1):
        assert any("(its traceback: " in line for line in job.lines(rank, "stderr")), job


@pytest.mark.slow
def test_a_hook_for_exceptions_of_the_programs_own_sees_all_of_them(launcher):
    hook = "sys.excepthook = lambda kind, *_: sys.stderr.write(f'mine {kind.__name__}\\n')\n"
    job = launcher.run("-np", 2, *LONG, python=hook + ENGINE_JOB + "if rank: raise ValueError\nengine.barrier()")
    assert "mine RankRaisedError" in job.lines(0, "stderr")


def test_no_line_of_the_engines_comes_into_what_a_hook_writes_bit_by_bit(launcher):
    """The hook's lines stay together, as in a traceback."""
    hook = (
        "import threading\n"
        "def hook(kind, *_):\n"
        "    print(f'mine {kind.__name__}', file=sys.stderr)\n"
        f"    threading.Event().wait({PAUSE})\n"
        "    print('and that is all', file=sys.stderr)\n"
        "sys.excepthook = hook\n"
    )
    job = launcher.run("-np", 2, *LONG, python=hook + ENGINE_JOB + "if rank: raise ValueError\nengine.barrier()")
    lines = job.lines(1, "stderr")
    assert lines[lines.index("mine ValueError") + 1] == "and that is all", lines
    assert any("ERROR: rank 1 failed" in line for line in lines), lines


@pytest.mark.slow
def test_the_odd_one_out_of_a_mismatch_is_named(launcher):
    program = ENGINE_JOB + "engine.allreduce(numpy.ones(2 + (rank == 1)), name='x')"
    job = launcher.run("-np", 3, *LONG, python=program)
    assert "enginerun: the ranks disagree: rank 1 is the odd one out" in job.err


@pytest.mark.slow
def test_a_rank_that_left_has_its_cause_told_once_with_what_it_may_be(launcher):
    program = ENGINE_JOB + "if rank == 0: engine.allreduce(numpy.ones(2), name='warm')"
    job = launcher.run("-np", 2, *LONG, python=program)
    assert "first failure: rank 1 " in job.failure[0]
    assert job.failure[0].count("left while") == 1 and "noticed it first" not in job.failure[0], job
    assert "Did ranks make different numbers of steps?" in job.failure[0]
