"""A rank's report of why it ended, and the launcher's decisions that depend on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.exit_report import report, writer
from engine.exit_report.report import ExitReport, Failure, Raised
from engine.host.python_startup import EXIT_REPORTS

pytestmark = pytest.mark.quick


def run(code: str, *options: str, home: Path, **variables: str) -> tuple[ExitReport, subprocess.CompletedProcess[str]]:
    """Run a Python program as a launcher does; return its exit report and the finished process."""
    page = report.make_page()
    environ = report.make_environment(page, {**os.environ, **variables})
    program = home / "program.py"
    program.write_text(code)
    done = subprocess.run(
        [sys.executable, *options, str(program)], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    return report.take_page(page), done


def test_a_program_that_never_imports_the_engine_reports_its_exception(tmp_path: Path) -> None:
    told, done = run("def f():\n    raise ValueError('bad batch')\nf()\n", home=tmp_path)
    assert done.returncode == 1 and "ValueError: bad batch" in done.stderr
    assert told == ExitReport(Raised("ValueError", "bad batch", str(tmp_path / "program.py"), 2))


@pytest.mark.parametrize(
    ("code", "kind", "line"),
    [
        ("import no_such_module\n", "ModuleNotFoundError", 1),
        ("x = 1\nx = = 2\n", "SyntaxError", 2),
        ("raise KeyboardInterrupt\n", "KeyboardInterrupt", 1),
        ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise KeyError('x')\n", "KeyError", 4),
        ("raise ExceptionGroup('several', [ValueError(1)])\n", "ExceptionGroup", 1),
        ("class E(Exception):\n    def __str__(self): raise RuntimeError\nraise E\n", "E", 3),
        ("import sys\nsys.excepthook = lambda *_: None\nraise ValueError\n", "ValueError", 3),
        ("import atexit\natexit.register(lambda: 1 / 0)\nraise ValueError\n", "ValueError", 3),
    ],
)
def test_an_exception_is_reported_by_its_type_and_place(tmp_path: Path, code: str, kind: str, line: int) -> None:
    told, _ = run(code, home=tmp_path)
    assert told.raised is not None
    assert (told.raised.type, told.raised.line) == (kind, line)
    assert told.raised.file == str(tmp_path / "program.py")
    assert not told.raised.consequence


@pytest.mark.parametrize(
    "code",
    [
        "",
        "import sys\nsys.exit(3)\n",
        "import os\nos._exit(3)\n",
        "import os\nos.abort()\n",
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    pass\nraise SystemExit('no')\n",
        "import threading\nthread = threading.Thread(target=lambda: 1 / 0)\nthread.start()\nthread.join()\n",
    ],
)
def test_who_ends_without_an_uncaught_exception_reports_none(tmp_path: Path, code: str) -> None:
    told, _ = run(code, home=tmp_path)
    assert told.empty


CHILD = "subprocess.run([sys.executable, '-c', 'raise KeyError'])"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (f"import subprocess, sys\n{CHILD}\nsys.exit(3)\n", None),
        (f"import subprocess, sys\n{CHILD}\nraise ValueError\n", "ValueError"),
        ("import os, sys\nif os.fork() == 0:\n    raise KeyError\nos.wait()\nsys.exit(3)\n", None),
        ("import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'raise KeyError'])\n", "KeyError"),
    ],
)
def test_the_rank_reports_and_not_what_it_has_started(tmp_path: Path, code: str, kind: str | None) -> None:
    told, _ = run(code, home=tmp_path)
    assert (told.raised.type if told.raised else None) == kind


def test_a_python_below_a_shell_reports(tmp_path: Path) -> None:
    page = report.make_page()
    command = f"{sys.executable} -c 'pass'; {sys.executable} -c 'raise KeyError'; exit 3"
    subprocess.run(
        ["sh", "-c", command], env=report.make_environment(page, os.environ), capture_output=True, check=False
    )
    told = report.take_page(page)
    assert told.raised is not None and told.raised.type == "KeyError"


def test_a_worker_that_calls_init_reports_in_place_of_who_started_it(tmp_path: Path) -> None:
    child = "from engine.exit_report import writer; writer.claim_rank(); raise KeyError"
    told, _ = run(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])\n", home=tmp_path)
    assert told.raised is not None and told.raised.type == "KeyError"


def test_a_child_that_is_forked_during_a_report_can_report_itself(tmp_path: Path) -> None:
    code = """
import os, signal, threading
from engine.exit_report import writer
held, done = threading.Event(), threading.Event()
def hold():
    with writer._lock:
        held.set()
        done.wait()
writer.report_failure(1, "died", "of the parent's world", 5.0)
threading.Thread(target=hold, daemon=True).start()
held.wait()
if (child := os.fork()) == 0:
    signal.alarm(20)
    writer.claim_rank()
    raise KeyError
os.waitpid(child, 0)
done.set()
os._exit(0)
"""
    told, _ = run(code, home=tmp_path)
    assert told.raised is not None and told.raised.type == "KeyError" and told.failure is None


def test_the_users_own_startup_file_runs_and_the_path_is_as_it_was(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import sys\nsys.theirs = 1\n")
    code = f"import sys\nassert sys.theirs == 1\nprint({str(EXIT_REPORTS)!r} in sys.path, 'writer' in sys.modules)\n"
    told, done = run(code, home=tmp_path, PYTHONPATH=str(own))
    assert (done.stdout, told.empty) == ("False False\n", True), done.stderr


def test_a_users_module_called_writer_is_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "writer.py").write_text("mine = 1\n")
    _, done = run("import writer\nprint(writer.mine)\n", home=tmp_path)
    assert done.stdout == "1\n", done.stderr


def test_python_that_reads_no_path_reports_once_it_has_called_init(tmp_path: Path) -> None:
    told, _ = run("raise ValueError\n", "-I", home=tmp_path)
    assert told.empty
    code = "from engine.exit_report import writer\nwriter.claim_rank()\nraise ValueError\n"
    told, _ = run(code, "-I", home=tmp_path)
    assert told.raised is not None


def test_a_page_that_has_gone_disturbs_nobody(tmp_path: Path) -> None:
    page = report.make_page()
    environ = report.make_environment(page, os.environ)
    report.take_page(page)
    done = subprocess.run([sys.executable, "-c", "1 / 0"], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ZeroDivisionError: division by zero") and done.stderr.count("Error") == 1


def test_what_has_taken_the_place_of_a_page_is_not_written_to(tmp_path: Path) -> None:
    page = report.make_page()
    environ = report.make_environment(page, os.environ)
    other = tmp_path / "other"
    with other.open("w+") as file:
        file.write("as it was")
        os.dup2(file.fileno(), page)
    try:
        subprocess.run([sys.executable, "-c", "1 / 0"], env=environ, capture_output=True, check=False)
    finally:
        os.close(page)
    assert other.read_text() == "as it was"


def test_an_exception_that_only_looks_like_the_engines_blames_nobody(tmp_path: Path) -> None:
    code = "class RankDiedError(Exception):\n    def get_blame(self): return 1, 'died'\nraise RankDiedError\n"
    told, _ = run(code, home=tmp_path)
    assert told.raised is not None and not told.raised.consequence


@pytest.mark.parametrize("text", ["\N{SNOWMAN}", ",", "[{", '"', "\0", "\udc80"])
def test_a_message_of_any_size_and_kind_is_reported_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """The message of an exception and that of a failure are reported beside each other."""
    page = report.make_page()
    for name, value in report.make_environment(page, {}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(writer.OWNER, str(os.getpid()))
    monkeypatch.setattr(writer, "_report", {})
    writer.report_failure(1, "died", text * 100_000, 5.0)
    writer.report_exception(ValueError(text * 100_000))
    told = report.take_page(page)
    shown = text.replace("\udc80", "?")
    assert told.raised is not None and told.raised.message.startswith(shown * 1000)
    assert told.failure is not None and told.failure.message.startswith(shown * 1000)


def test_a_report_is_withdrawn_in_the_next_world(monkeypatch: pytest.MonkeyPatch) -> None:
    page = report.make_page()
    for name, value in report.make_environment(page, {}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(writer.OWNER, str(os.getpid()))
    monkeypatch.setattr(writer, "_report", {})
    writer.report_failure(1, "died", "rank 1 died", 5.0)
    assert ExitReport.parse(os.pread(page, writer.LIMIT, 0)) == ExitReport(
        failure=Failure(1, "died", "rank 1 died", 5.0)
    )
    writer.report_exception(ValueError("caught"))
    writer.clear()
    assert report.take_page(page).empty


def test_a_report_survives_its_way_to_the_launcher() -> None:
    whole = ExitReport(Raised("E", "x\udc80\n", "a.py", 3, True, 2, "stalled"), Failure(2, "stalled", "why", 1.5))
    assert ExitReport.parse(whole.to_bytes()) == ExitReport(
        Raised("E", "x?\n", "a.py", 3, True, 2, "stalled"), Failure(2, "stalled", "why", 1.5)
    )
    assert whole.stalled_rank == 2


REWORDED = """
import random, engine_ext.errors
dice = random.Random({seed} + rank)
def reworded(self): return "".join(dice.choice("aeiou nrst") for _ in range(60))
engine_ext.errors.EngineError.__str__ = reworded
"""
ENGINE_JOB = """
import numpy, engine
engine.init(start_timeout=4, stall_limit=6)
engine.allreduce(numpy.ones(2), name="warm")
"""
LAST = "engine.allreduce(numpy.ones(2), name='x')\n"
JOBS: dict[str, tuple[str, str, int]] = {
    "absent": ("if rank == 1: linger()\n" + ENGINE_JOB, "did not come to engine.init", 1),
    "stalled": (ENGINE_JOB + "if rank == 1: linger()\n" + LAST, "stood still", 1),
    "died": (ENGINE_JOB + "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n" + LAST, "killed by SIGKILL", 137),
    "raised": (ENGINE_JOB + "if rank == 1: raise ValueError\n" + LAST, "exit code 1", 1),
    "left": (ENGINE_JOB + "if rank == 1: sys.exit(0)\n" + LAST, "left while others needed it", 1),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", JOBS)
def test_the_verdict_does_not_depend_on_what_the_engine_writes(launcher: Any, how: str) -> None:
    """The launcher names the same culprit although the text of every exception of the engine changes on each use."""
    program, told, code = JOBS[how]
    for reworded in ("", REWORDED.format(seed=7)):
        job = launcher.run("-np", 3, "--grace-period", 3, python=reworded + program)
        assert job.code == code, job
        assert job.failure[0].startswith("enginerun: first failure: rank 1 on ") and told in job.failure[0], job
        assert ("did not come within" in job.err) == (not reworded and how == "absent")


@pytest.mark.slow
def test_an_elastic_job_ends_by_what_workers_raise_and_not_by_what_they_write(launcher: Any) -> None:
    program = """
import engine
from engine.elastic import ObjectState, run
sys.stderr = open(os.devnull, "w")
@run
def train(state):
    raise ValueError("the same")
train(ObjectState(step=0))
"""
    job = launcher.run("-np", 2, "--min-np", 1, python=program.replace("RANK", "ENGINE_WORKER"))
    assert job.code == 1
    assert "raised the same: ValueError in " in job.err and "Traceback" not in job.err
    [kept] = launcher.kept()
    assert json.loads(next(kept.glob("rank.*/exit.json")).read_text())["raised"]["message"] == "the same"
