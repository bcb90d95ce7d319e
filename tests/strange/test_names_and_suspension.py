"""Names that are not ASCII or not text, in the plainest locale; and jobs that are suspended for a while."""

from __future__ import annotations

import os
import shutil
import signal
import site as site_module
import sys
import venv
from pathlib import Path

import pytest

from ..waiting import until
from .strange_machines import DONE, JOB, LAUNCH, Machine, lines

# LANG=C with Python's coercion to UTF-8, and without it.
LOCALES = [{"LANG": "C"}, {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]

TOP = [sys.executable, "-m", "engine.launch", "top", "--once", "--interval", "0.2"]


@pytest.mark.parametrize("locale", LOCALES, ids=["c", "posix"])
def test_names_with_blanks_and_any_bytes(machine: Machine, locale: dict[str, str]) -> None:
    odd = machine.home / os.fsdecode(b"mein Rechner " + b"\xfc\xff")
    (odd / "tmp").mkdir(parents=True)
    environment = machine.home / "Umgebung, größer 空白"
    venv.create(environment, symlinks=True)
    python = environment / "bin/python"
    packages = next((environment / "lib").glob("python*/site-packages"))
    # The engine's dependencies are those of the tests.
    # Through a .pth, since Debian's Python has a sitecustomize.py of its own.
    (packages / "outer.pth").write_text(f"import site; site.addsitedir({site_module.getsitepackages()[0]!r})\n")
    script = shutil.copy(JOB, odd / "trainiere größer.py")
    run = machine.run(
        [python, *LAUNCH[1:], "--summary", "--output-dir", odd / "Ausgabe 1", python, script],
        env={**locale, "TMPDIR": str(odd / "tmp"), "HOME": str(odd)},
        cwd=odd,
    )
    assert lines(run) == DONE
    assert (odd / "Ausgabe 1/rank.1/stdout").read_text() == DONE[1] + "\n"
    failed = machine.run(
        [python, *LAUNCH[1:], "--output-dir", odd / "Ausgabe 2", python, "-c", "raise ValueError('\\xfc \\udcfc')"],
        env=locale,
        cwd=odd,
    )
    assert failed.returncode == 1
    assert "first failure: rank " in failed.stderr and "  | ValueError: " in failed.stderr
    assert "Traceback" not in [line for line in failed.stderr.split("\n") if not line.startswith(("[", " "))]


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGTSTP])
def test_a_suspended_job_goes_on(machine: Machine, number: signal.Signals) -> None:
    hold = machine.home / "hold"
    hold.mkdir()
    process = machine.start([*LAUNCH, sys.executable, JOB, "hold", hold], env={"ENGINE_STALL_LIMIT": "20"})

    def rounds() -> list[int]:
        return [int((hold / f"rounds.{rank}").read_text() or 0) for rank in range(2)]

    until(lambda: all((hold / f"rounds.{rank}").exists() for rank in range(2)), "both ranks are at work")
    ranks = [int((hold / f"up.{rank}").read_text()) for rank in range(2)]
    # Ctrl-Z reaches the launcher alone, since ranks lead sessions of their own; a batch system stops every process.
    stopped = [process.pid, *(ranks if number == signal.SIGSTOP else [])]
    for pid in stopped:
        os.kill(pid, number)
    until(lambda: all(state(pid) == "T" for pid in stopped), "all that were told to have stopped")
    before = rounds()
    if number == signal.SIGTSTP:
        until(lambda: min(rounds()) > max(before), "the ranks go on without their launcher")
    else:
        shown = machine.run([*TOP, process.pid], env=LOCALES[1])
        assert shown.returncode == 0 and "stopped" in shown.stdout, shown.stdout + shown.stderr
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    until(lambda: min(rounds()) > max(before), "the ranks go on")
    (hold / "go").touch()
    assert lines(machine.finish(process)) == DONE


def state(pid: int) -> str:
    """State of a process: T if it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
