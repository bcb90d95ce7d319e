"""Randomly damaged files, given to the commands that read them: the result is an answer, or a one-line error.

Each kind begins with a valid file. Bits are flipped, ends cut, blocks repeated, and numbers and values of JSON replaced
by harmful ones: at limits, beyond them, nested deeply.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from autotune import Tuner, cli, horovod_csv, journal
from engine.config.hub_address import read_secret
from engine.config.world import detect_world
from engine.errors import EngineError
from engine.exit_report.report import ExitReport, Failure, Raised
from engine.foresee.command import main as foresee
from engine.launch.cli.horovod_options import arguments_of
from engine.launch.errors import LaunchError
from engine.launch.hosts.host_list import read_discovered
from engine.launch.hosts.reach import hosts_of
from engine.launch.jobfile.command import main as job
from engine.launch.process.rank_end import RankEnd
from engine.launch.report.failure_report import failure_lines, find_first_failure, flight_records
from engine.metrics import elastic_job, page
from engine.metrics.report.find_jobs import by_rank, look_into, state_letter
from engine.metrics.report.rates import JobReading, compute_rates
from engine.metrics.report.top_screen import Frame, describe_end, draw_frame
from engine.trace.__main__ import main as trace

from ..autotune.surfaces import DEFAULT, SPACE, bowl, search
from ..hostile_numbers import hostile_number
from ..metrics.fake_pages import ELASTIC, training
from ..metrics.written_pages import content
from .test_trace_reading import a_rank, of_worlds, part, pending, place, record, row, write

SECONDS = 2.0  # limit for one file on a busy machine; usually milliseconds
MEMORY = 300 << 20  # bytes by which all files of a kind may grow the process
HARM = (b"1e999", b"-1", b"1e300", b"9" * 25, b"9" * 5000, b"18446744073709551615", b"9223372036854775807", b"NaN",
        b"null", b"true", b'""', b"[]", b"{}", b'"\\ud800\\u001b]0;x"', b"[" * 2000, b'{"a":' * 2000, b"0.5", b"-0",
        b"\0", b"\xff\xfe", b"\xe2\x80\xae", b"*a", b"&a [*a]", b"1000000000000", b"-99999999999999")  # fmt: skip
TOKEN = re.compile(rb'"(?:[^"\\\n]|\\.)*"|-?\d[\d.eE+-]*|\b\w+\b')


def damaged(dice: random.Random, good: bytes) -> bytes:
    """File with one to three damages."""
    data = bytearray(good)
    for _ in range(dice.choice((1, 1, 2, 3))):
        at, kind = dice.randrange(len(data) + 1), dice.randrange(8)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << dice.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            del data[at : at + dice.choice((1, 8, 100))]
        elif kind == 3:
            end = min(len(data), at + dice.choice((1, 20, 500)))
            data[at:end] = data[at:end] * dice.choice((2, 3, 50))
        elif kind == 4:
            data[at:at] = bytes(dice.randrange(256) for _ in range(dice.choice((1, 8, 64))))
        elif found := list(TOKEN.finditer(data)):
            token = dice.choice(found)
            digits = token[0].isdigit()
            harm = str(hostile_number(dice, int(token[0][:15]))).encode() if digits and dice.random() < 0.5 else None
            data[token.start() : token.end()] = dice.choice(HARM) if harm is None else harm
    return bytes(data)


GOOD: list[bool] = []  # non-empty while the valid file is read, which must not be refused
ERRORS: list[str] = []  # errors of the file that was read last
Case = tuple[bytes, Callable[[bytes], Any]]


def of_file(path: Path, read: Callable[[], Any]) -> Callable[[bytes], Any]:
    def reading(data: bytes) -> Any:
        path.write_bytes(data)
        return read()

    return reading


def ends(*codes: int) -> Callable[[int], None]:
    def check(code: int) -> None:
        assert code == 0 or (code in codes and not GOOD)

    return check


def timeline(home: Path) -> Case:
    events = a_rank(0)
    events[0]["args"]["engine_knobs"] = {"fusion_threshold": 1 << 20, "cycle_time_ms": 1.0, "chunk_bytes": 1 << 16}
    events += [{**event, "ts": event.get("ts", 0) + 60_000} for event in a_rank(0)[3:]]
    path = write(home / "t.rank0.json", events)

    def read() -> None:
        for command in (["summary"], ["summary", "--json"], ["merge", "-o", str(home / "out.json")]):
            ends(0, 2)(trace([*command, str(path)]))
        ends(0, 2)(foresee([str(path), "--hosts", "2,8", "--bandwidth", "25G", "--latency", "30us"]))

    return path.read_bytes(), of_file(path, read)


def worlds(home: Path) -> Case:
    path = of_worlds(home) / "world.2" / "rank.1.trace.json"
    return path.read_bytes(), of_file(path, lambda: ends(0, 2)(trace(["merge", str(home), "-o", f"{home}/out"])))


def flight(home: Path) -> Case:
    (home / "rank.0").mkdir()
    waiting = [pending("known", 5, [1, 2]), pending("new", 4, None)]
    history, ranks = [row(380, "a"), row(381, "b", None)], [place(0, 381, 4), place(1, 381, 3)]
    sent = {"dtype": "float32", "dims": [3, 4], "bytes": 48, "described": "allreduce float32[3, 4]", "begun": False}
    undone = [
        {
            **sent,
            "name": "new",
            "kind": "allreduce",
            "entry": 382,
            "failed_call": False,
            "submitted": 1.0,
            "ended": 2.0,
        },
        {**sent, "name": "x", "kind": "allgather", "entry": None, "failed_call": True, "submitted": 1.0, "ended": 2.0},
    ]
    sets = [part([0, 1], pending=waiting, history=history, ranks=ranks, unfinished=undone)]
    more = {"process_sets": sets, "common": 12.5, "unfinished": undone}
    told = record(0, 3, pending=waiting, history=history, ranks=ranks, **more)
    mismatch = {"rank": 0, "cause": "raised", "message": "MismatchError: ranks disagree on 'new'", "time": 1.8e9}
    (home / "rank.0" / "failure.json").write_text(json.dumps(mismatch))

    def read() -> None:
        for more in ([], ["--json"]):
            ends(0, 2)(trace(["flight", *more, str(home)]))
        ends(0, 2)(trace(["torch-dumps", str(home)]))
        assert flight_records(home) == [0]

    return json.dumps(told).encode(), of_file(home / "rank.0" / "flight.json", read)


def failure(home: Path) -> Case:
    (home / "rank.0").mkdir()
    path = home / "rank.0" / "failure.json"
    told = {"rank": 1, "cause": "died", "message": "rank 1 died", "time": 1.8e9, "common": 12.5}

    def read() -> None:
        ends(0, 2)(trace(["flight", str(home)]))

    return json.dumps(told).encode(), of_file(path, read)


def exit_report(home: Path) -> Case:
    told = ExitReport(Raised("ValueError", "bad", "a.py", 3, True, 1, "died"), Failure(1, "died", "rank 1 died", 1.8e9))

    def read(data: bytes) -> None:
        found = ExitReport.parse(data)
        assert not (GOOD and found.empty)
        ends = [RankEnd(0, 1, 1.8e9, report=found), RankEnd(1, -9, 1.8e9)]
        verdict = find_first_failure(ends)
        assert verdict is not None
        failure_lines(verdict, ends, home, 1.8e9)
        ExitReport.parse(found.to_bytes())

    return told.to_bytes(), read


def log(home: Path) -> Case:
    path = home / "log.jsonl"
    with journal.Journal(path, {"link": {"latency": 1e-5, "bandwidth": 1e9}}) as rows:
        search(
            Tuner(SPACE, DEFAULT, seed=3, max_trials=8, journal=rows), bowl(0.3, 0.3, True), np.random.default_rng(0)
        )

    def read() -> None:
        for command in ("show", "best"):
            ends(0, 2)(cli.main([command, str(path)]))

    return path.read_bytes(), of_file(path, read)


def samples(home: Path) -> Case:
    good = f"{horovod_csv.HEADER}\n0,0,1,1.5,64,1234.5\n0,0,1,2.5,32,2234.5\n".encode()
    path = home / "log.csv"
    return good, of_file(path, lambda: [ends(0, 2)(cli.main([each, str(path)])) for each in ("show", "best")])


def known(home: Path) -> Case:
    from autotune.result_cache import JobKind, Known, store_result

    job = JobKind("a1b2", 10, 1000, 4, 1, "shm", "a processor", 8, "1.0", {})
    store_result(home, Known(job, {"fusion_threshold": 1 << 20}, 0.1, 0.05, 12))
    path = home / job.file
    return path.read_bytes(), of_file(path, lambda: ends(0)(cli.main(["known", "--cache", str(home)])))


def refused(*errors: type[Exception]) -> Callable[[Callable[[], Any]], Callable[[], None]]:
    def wrap(read: Callable[[], Any]) -> Callable[[], None]:
        def reading() -> None:
            try:
                read()
            except errors as error:
                if GOOD:
                    raise
                ERRORS.append(str(error))

        return reading

    return wrap


def hostfile(home: Path) -> Case:
    path = home / "hosts"
    given = argparse.Namespace(hosts=None, hostfile=path)
    good = b"# hosts\na slots=4\nb:2\n[::1] slots=1 max_slots=8\nuser@c\n"
    return good, of_file(path, refused(LaunchError)(lambda: hosts_of(given)))


def discovery(home: Path) -> Case:
    def read(data: bytes) -> None:
        refused(ValueError)(lambda: read_discovered(data.decode(errors="replace"), 4))()

    return b"a:4\nb\nuser@c:2\n10.0.0.1:8\n", read


def slurm(home: Path) -> Case:
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID")

    def read(data: bytes) -> None:
        values = data.decode(errors="replace").split(" ")
        environ = dict(zip(names, values, strict=False)) | {"ENGINE_SECRET": "0" * 32, "ENGINE_HUB": "localhost:1234"}
        refused(EngineError)(lambda: detect_world(environ))()

    return b"3 8 1 2(x3),2 1", read


def job_file(home: Path) -> Case:
    good = (
        b"project: p\ntrain:\n  framework: pytorch\n  run:\n    - python a.py\n  resources:\n    cpus: 1\n    gpus: 0\n"
    )
    path = home / "job.yml"
    return good, of_file(path, refused(LaunchError)(lambda: job([str(path), "--check"])))


def settings(suffix: str) -> Callable[[Path], Case]:
    def make(home: Path) -> Case:
        good = {
            "yaml": b"params:\n  fusion-threshold-mb: 32\n  cycle-time-ms: 1.5\ntimeline:\n  filename: t.json\n",
            "json": b'{"params": {"fusion-threshold-mb": 32, "cycle-time-ms": 1.5}, "verbose": true}',
            "toml": b"verbose = true\n[params]\nfusion-threshold-mb = 32\ncycle-time-ms = 1.5\n",
        }[suffix]
        path = home / f"settings.{suffix}"
        options = {"--fusion-threshold-mb", "--cycle-time-ms", "--timeline-filename", "--verbose"}
        return good, of_file(path, refused(LaunchError)(lambda: arguments_of(path, options)))

    return make


def counters(home: Path) -> Case:
    good = content(**training(1, 4, 2) | {"copied_ns": 5 * 10**9, "copied_state": ord("R")})
    path = home / "page"
    console = Console(width=100, file=open(os.devnull, "w"))  # noqa: SIM115

    def read() -> None:
        before = JobReading(1.0, by_rank([look_into(path), page.read(home / "good")]))
        now = JobReading(2.0, before.pages)
        letters = {rank: state_letter(each) for rank, each in now.snapshots.items()}
        frame = Frame("r", now, compute_rates(before, now), letters, time.time(), ELASTIC)
        console.print(draw_frame(frame, 100, 30))
        describe_end(frame)

    (home / "good").write_bytes(good)
    return good, of_file(path, read)


def board(home: Path) -> Case:
    console = Console(width=100, file=open(os.devnull, "w"))  # noqa: SIM115

    def read(data: bytes) -> None:
        import zlib

        path = home / "board"
        path.write_bytes(b"%08x %08x " % (len(data), zlib.crc32(data)) + data)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            found = elastic_job.read(descriptor)
        finally:
            os.close(descriptor)
        frame = Frame("r", JobReading(1.0, {}), {}, {}, time.time(), found)
        console.print(draw_frame(frame, 100, 30))

    return json.dumps(asdict(ELASTIC)).encode(), read


def secret_file(home: Path) -> Case:
    path = home / "secret"
    return b"0123456789abcdef" * 4, of_file(
        path, refused(EngineError)(lambda: read_secret({"ENGINE_SECRET_FILE": str(path)}))
    )


KINDS = {
    "timeline": timeline, "worlds": worlds, "flight record": flight, "failure report": failure,
    "exit report": exit_report, "journal": log,
    "horovod's samples": samples, "known results": known, "host file": hostfile, "discovery": discovery,
    "slurm": slurm, "job": job_file, "yaml": settings("yaml"), "json": settings("json"), "toml": settings("toml"),
    "counters": counters, "elastic job": board, "secret": secret_file,
}  # fmt: skip


@pytest.mark.sample(6)
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_an_answer_or_one_error(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    good, read = KINDS[kind](tmp_path)
    GOOD.append(True)
    read(good)
    GOOD.clear()
    capfd.readouterr()
    begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    for seed in range(int(os.environ.get("HOSTILE_FILES", "60"))):
        data = damaged(random.Random(f"{kind} {seed}"), good)
        start = time.thread_time()
        try:
            read(data)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        assert time.thread_time() - start < SECONDS, f"seed {seed}"
        for error in ERRORS:
            assert len(error) < 1000 and error.isprintable(), f"seed {seed}"
        ERRORS.clear()
        said = capfd.readouterr()
        assert "Traceback" not in said.err and "\x1b" not in said.out + said.err, f"seed {seed}"
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - begun < MEMORY
