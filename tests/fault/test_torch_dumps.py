"""Dumps for PyTorch's unmodified `torchfrtrace`, of jobs that hang: it names the same ranks as the engine."""

from __future__ import annotations

import gc
import io
import logging
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.trace.postmortem import make_report
from engine.trace.torch_dumps import convert_records

from ..ranks import Job, start_ranks
from ..waiting import until
from . import hang_programs
from .faults import ready, request_records, state

pytest.importorskip("torch")
READER = Path(sys.executable).with_name("torchfrtrace")
NAMED = re.compile(r"^missing ranks: \{([0-9, ]+)\}|^error msg: (.*)", re.MULTILINE)
CULPRIT = re.compile(r"Culprit rank ([0-9]+)")
DISAGREE = ("shape", "dtype", "reduction", "operation")
WAITING = ("absent", "known", "stopped", "another name")
ENDING = ("killed", "raised")
KINDS = (*DISAGREE, *WAITING, *ENDING, "inside")

pytestmark = pytest.mark.skipif(not READER.exists(), reason="this torch has no torchfrtrace")


def named_by_reader(dumps: Path, command: bool = False) -> tuple[list[int], str]:
    """Return the ranks that `torchfrtrace` names first, and all that it says; `command` runs it in a process."""
    if command:
        done = subprocess.run([str(READER), str(dumps)], capture_output=True, text=True, check=True)
        text = done.stdout + done.stderr
    else:
        text = read_in_process(dumps)
    found = NAMED.search(text)
    if found is None:
        return [], text
    ranks = re.findall("[0-9]+", found[1]) if found[1] else CULPRIT.findall(found[2])
    return sorted(map(int, ranks)), text


def read_in_process(dumps: Path) -> str:
    """Call the function of the console script `torchfrtrace`, which saves a process that imports torch."""
    from torch.distributed.flight_recorder import fr_trace

    said = io.StringIO()
    handler, logger = logging.StreamHandler(said), logging.getLogger("Flight Recorder")
    logger.addHandler(handler)
    try:
        fr_trace.main([str(dumps)])
    finally:
        logger.removeHandler(handler)
        gc.enable()  # which it disables
    return said.getvalue()


def draw_hang(dice: random.Random, number: int) -> tuple[str, int, int, int, int, bool]:
    """Draw a hang: kind, number of ranks, victim, operations before it, process set, and whether a limit ends it."""
    kind = KINDS[number % len(KINDS)]
    size, before = dice.choice((3, 4)), dice.randrange(6)
    where = dice.choice((-1, -1, 2)) if kind in DISAGREE else dice.choice((-1, 0, 1, 2))
    where = -1 if kind in ("inside", "known") else where
    where = 2 if kind == "another name" and where >= 0 else where  # of two ranks that differ, neither is to blame
    size = 4 if where == 2 else size
    victim = dice.randrange(size) if where < 0 else dice.choice(hang_programs.SETS[where])
    return kind, size, victim, max(before, kind == "known"), where, dice.random() < 0.3


def run_hang(hang: tuple[str, int, int, int, int, bool], look: Callable[[Job], None]) -> None:
    """Run a job that hangs, and look at its directory once its ranks have left their records."""
    kind, size, victim, before, where, limited = hang
    ends = limited or kind in (*DISAGREE, *ENDING)
    env = {"ENGINE_STALL_LIMIT": "2" if limited else "60"}
    program = (
        (hang_programs.stop_inside, victim) if kind == "inside" else (hang_programs.hang, kind, victim, before, where)
    )
    with start_ranks(size, *program, env=env) as job:
        if ends:
            until(lambda: job.process.poll() is not None, "the job has failed")
        else:
            stops = kind in ("inside", "stopped")
            ready(job)
            if stops:
                until(lambda: state(job, victim) == "T", "a stop")

            def is_seen() -> bool:
                """Request records; inside an entry, return whether the others have come to where the victim stopped."""
                request_records(job, [rank for rank in range(size) if not stops or rank != victim])
                return kind != "inside" or make_report(job.output)[1]["culprits"] == [victim]

            until(is_seen, "the standstill is seen")
        look(job)


def check_hang(hang: tuple[str, int, int, int, int, bool], dumps: Path, command: bool = False) -> None:
    """Check that the injected rank is the one that the engine and the reader name."""

    def look(job: Job) -> None:
        report, data = make_report(job.output)
        convert_records(job.output).write_files(dumps)
        ranks, text = named_by_reader(dumps, command)
        assert data["culprits"] == [hang[2]], f"{hang}\n{report}"
        assert ranks == [hang[2]], f"{hang}\n{report}\n{text}"

    run_hang(hang, look)


@pytest.mark.parametrize("number", range(len(KINDS) + 1))
def test_torchfrtrace_names_the_rank_that_hangs_a_job(number: int, tmp_path: Path) -> None:
    check_hang(draw_hang(random.Random(number), number), tmp_path / "dumps", command=number == len(KINDS))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(100, 200))
def test_torchfrtrace_names_the_rank_in_a_hundred_hangs(number: int, tmp_path: Path) -> None:
    check_hang(draw_hang(random.Random(number), number), tmp_path / "dumps")
