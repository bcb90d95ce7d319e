"""`enginerun top` in terminals and pipes, on jobs that are healthy, failing, or over."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from engine.launch.cli import COMMANDS
from engine.launch.cli import main as enginerun
from engine.metrics.page import PageError, Snapshot
from engine.metrics.report.find_jobs import RunningJob
from engine.metrics.report.rates import GroupRates, JobReading, Page, Rates
from engine.metrics.report.top import TopError, choose_job, main
from engine.metrics.report.top_screen import Frame, describe_end, draw_frame

from ..waiting import measured
from .fake_pages import ELASTIC
from .watched_jobs import ENVIRONMENT
from .written_pages import groups_of, snapshot, words_of

TOP = [sys.executable, "-m", "engine.launch", "top"]
DEADLINE = 60.0
SIZE = "COLUMNS", "LINES"  # variables that come before a terminal's own size; pytest-xdist sets them
LAST = "\N{SYMBOL FOR END OF TRANSMISSION}"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A terminal of a given size in which a program runs."""

    def __init__(self, command: list[str], columns: int, lines: int, **variables: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={key: value for key, value in ENVIRONMENT.items() if key not in SIZE}
            | {"TERM": "xterm-256color"}
            | variables,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self._theirs = theirs
        self._decoder = codecs.getincrementaldecoder("utf-8")()  # a read may end within a character
        self.raw = ""

    @property
    def text(self) -> str:
        """Output so far, without escape sequences."""
        return ESCAPES.sub("", self.raw)

    def wait_for(self, pattern: str, times: int = 1) -> None:
        """Wait until a text has been printed a number of times."""
        end = time.monotonic() + DEADLINE
        while len(re.findall(pattern, self.text)) < times:
            assert time.monotonic() < end, f"no {pattern!r} in {self.text!r}"
            self._read(0.1)

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def finish(self) -> int:
        """Wait for the end, and read all output."""
        end = time.monotonic() + DEADLINE
        while self.process.poll() is None:
            assert time.monotonic() < end, self.text
            self._read(0.05)
        while self._read(0):
            pass
        os.write(self._theirs, LAST.encode())  # follows all output of the program, whenever that comes
        while not self.raw.endswith(LAST):
            assert time.monotonic() < end, self.text
            self._read(0.05)
        self.raw = self.raw.removesuffix(LAST)
        return self.process.returncode

    @property
    def attributes(self) -> list[Any]:
        """Attributes of the terminal, such as echo."""
        return termios.tcgetattr(self._theirs)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)

    def _read(self, seconds: float) -> bool:
        if not select.select([self._ours], [], [], seconds)[0]:
            return False
        self.raw += self._decoder.decode(os.read(self._ours, 1 << 16))
        return True


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """Open terminals that are closed after the test."""
    opened: list[Terminal] = []

    def start(*arguments: str, size: tuple[int, int] = (80, 24), **variables: str) -> Terminal:
        opened.append(Terminal([*TOP, *arguments], *size, **variables))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def once(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `enginerun top --once` into a pipe."""
    command = [*TOP, *arguments, "--once", "--interval", "0.3"]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=100)


# ---- in a terminal ---------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(("size", "ranks", "shown"), [((80, 24), 3, 3), ((200, 60), 40, 40), ((80, 24), 40, None)])
def test_frames_fit_into_the_terminal(
    fake_job: Any, terminal: Callable[..., Terminal], size: tuple[int, int], ranks: int, shown: int | None
) -> None:
    job = fake_job(ranks)
    top = terminal(job.name, "--interval", "0.2", size=size)
    top.wait_for("steps/s  ", times=3)
    top.type(b"q")
    assert top.finish() == 0
    assert max(map(len, re.split(r"[\r\n]+", top.text))) <= size[0]
    ups = [len(found) // len("\x1b[1A\x1b[2K") for found in re.findall(r"(?:\x1b\[1A\x1b\[2K)+", top.raw)]
    assert ups and max(ups) < size[1], "a frame is drawn over the last one"
    frame = ESCAPES.sub("", re.split(r"(?:\x1b\[1A\x1b\[2K)+", top.raw)[-1])
    rows = re.findall(r"^ *(\d+) .* running", frame, re.MULTILINE)
    if shown is None:
        assert f"{ranks - len(rows)} ranks that are no slower are not shown" in frame
        assert str(ranks - 1) in rows, "the slowest is shown"
    else:
        assert rows == [str(rank) for rank in range(shown)]
    assert "?1049" not in top.raw and "?1000" not in top.raw, "no alternate screen, no mouse"


@pytest.mark.slow
def test_it_shows_who_is_late_and_what_is_overdue(fake_job: Any, terminal: Callable[..., Terminal]) -> None:
    job = fake_job(3)
    job.tell("write", 0, "worlds", 2)
    job.tell("write", 1, "stalled", 2)
    job.tell("write", 0, "tuner_phase", 2)
    job.tell("write", 0, "tuner_best_ps", 50 * 10**9)
    job.tell("write", 2, "lag_ns", 10**15)  # each tensor adds 2 ms to it
    top = terminal(job.name, "--interval", "0.2")
    top.wait_for("rank 1: 2 operations are overdue")
    top.wait_for("tuner: searching .* best 50 ms")
    top.wait_for("resets 1")
    top.wait_for(r"fusion-threshold 64M  cycle-time-ms 5")
    top.wait_for(r"blocked \d+\.\d %")


@pytest.mark.sample(1)
@pytest.mark.parametrize("leave", [b"q", b"Q", b"\x03"])
def test_it_leaves_at_a_key_and_leaves_the_terminal_as_it_was(
    fake_job: Any, terminal: Callable[..., Terminal], leave: bytes
) -> None:
    job = fake_job(1)
    top = terminal(job.name, "--interval", "60")
    top.wait_for("running")
    top.type(leave)
    assert top.finish() == 0
    assert top.attributes == top.before
    assert top.raw.rstrip().endswith("\x1b[?25h") or top.raw.count("\x1b[?25h") == top.raw.count("\x1b[?25l")
    assert job.process.poll() is None, "the job is left alone"


@pytest.mark.slow
def test_a_signal_leaves_the_terminal_as_it_was(fake_job: Any, terminal: Callable[..., Terminal]) -> None:
    top = terminal(fake_job(1).name, "--interval", "60")
    top.wait_for("running")
    os.kill(top.process.pid, signal.SIGTERM)
    assert top.finish() == 0
    assert top.attributes == top.before and top.raw.count("\x1b[?25h") == top.raw.count("\x1b[?25l") > 0


BEFORE_THE_WAIT = """
import contextlib, ctypes, functools, sys
from engine.metrics.report import top

class Keys:
    # `select` asks for the descriptor when the interpreter has looked for signals for the last time. What raises one
    # in C returns 0, and that is the descriptor.
    fileno = functools.partial(ctypes.CDLL(None)["raise"], int(sys.argv[2]))

top._keys = lambda: contextlib.nullcontext(Keys())
sys.exit(top.main([sys.argv[1], "--interval", "3600"]))
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_comes_just_before_the_wait_ends_it(fake_job: Any, number: signal.Signals) -> None:
    reading, writing = os.pipe()
    try:
        command = [sys.executable, "-c", BEFORE_THE_WAIT, fake_job(1).name, str(int(number))]
        run = subprocess.run(command, env=ENVIRONMENT, stdin=reading, stdout=subprocess.DEVNULL, timeout=DEADLINE)
    finally:
        os.close(reading)
        os.close(writing)
    assert run.returncode == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("command", "said"), [(("end",), "ranks 0, 1 ended"), (("fail", 1), "rank 0 failed, as rank 1 died; rank 1 gone")]
)
def test_it_leaves_when_the_job_ends_and_says_how(
    fake_job: Any, terminal: Callable[..., Terminal], command: tuple[Any, ...], said: str
) -> None:
    job = fake_job(2)
    top = terminal(job.name, "--interval", "0.2")
    top.wait_for("running")
    job.tell(*command)
    job.process.communicate(timeout=60)
    assert top.finish() == 0
    assert re.search(rf"{job.name} is over after \d+:\d\d:\d\d", top.text) and said in top.text


@pytest.mark.slow
def test_stopped_ranks_are_shown_as_stopped(fake_job: Any, terminal: Callable[..., Terminal]) -> None:
    job = fake_job(2)
    os.kill(job.ranks[1], signal.SIGSTOP)
    top = terminal(job.name, "--interval", "0.2")
    top.wait_for("rank 1: the process is stopped")
    os.kill(job.ranks[1], signal.SIGKILL)
    top.wait_for("rank 1: the process is gone, without a word")


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"LANG": "C", "LC_ALL": "C"}, {"NO_COLOR": "1"}])
def test_poor_terminals_are_enough(fake_job: Any, terminal: Callable[..., Terminal], variables: dict[str, str]) -> None:
    job = fake_job(1)
    top = terminal(job.name, "--interval", "0.2", **variables)
    top.wait_for("running", times=2)
    top.type(b"q")
    assert top.finish() == 0 and top.text.isascii()


# ---- in a pipe -------------------------------------------------------------------------------------------------------


def test_once_prints_one_table_into_a_pipe(fake_job: Any) -> None:
    job = fake_job(3)

    def measure() -> None:
        run = once(str(job.pid))
        assert run.returncode == 0 and run.stderr == "" and "\x1b" not in run.stdout
        assert len(re.findall(r"^ *\d+ .*running", run.stdout, re.MULTILINE)) == 3
        row = re.search(r"^ *2 +([0-9.]+) +([0-9.]+) .*running", run.stdout, re.MULTILINE)
        assert row is not None and float(row[1]) > 1 and float(row[2]) == 50.0

    measured(measure)  # the job may stand still while it is looked at


@pytest.mark.slow
def test_many_ranks_go_into_a_pipe_in_full(fake_job: Any) -> None:
    run = once(fake_job(40).name)
    assert len(re.findall("running", run.stdout)) == 40 and "not shown" not in run.stdout


@pytest.mark.slow
def test_a_rank_whose_page_cannot_be_read_has_a_row_and_a_reason(fake_job: Any) -> None:
    job = fake_job(4)
    for command, rank in (("junk", 1), ("version", 2), ("clear", 3)):
        job.tell(command, rank)
    run = once(job.name)
    assert run.returncode == 0
    assert [re.search(rf"^ *{rank} .* (\w+) *$", run.stdout, re.MULTILINE)[1] for rank in range(4)] == [  # type: ignore[index]
        *("running", "unreadable", "unreadable", "starting"),
    ]
    assert "rank 1: the page of counters begins with" in run.stdout
    assert "rank 2: the page of counters is of version 7" in run.stdout


@pytest.mark.slow
def test_it_goes_on_in_a_pipe_until_the_job_ends_without_a_terminal(fake_job: Any) -> None:
    job = fake_job(1)
    command = [*TOP, job.name, "--interval", "0.2"]
    with subprocess.Popen(command, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as top:
        assert top.stdout is not None
        for _ in range(2):
            while "running" not in top.stdout.readline():
                assert top.poll() is None
        job.tell("end")
        job.process.communicate(timeout=60)
        assert "is over" in top.communicate(timeout=DEADLINE)[0]
    assert top.returncode == 0


@pytest.mark.slow
def test_a_reader_that_has_had_enough_is_no_error(fake_job: Any) -> None:
    command = " ".join(TOP) + f" {fake_job(1).name} --interval 0.1 | head -1"
    run = subprocess.run(command, shell=True, env=ENVIRONMENT, capture_output=True, text=True, timeout=100)
    assert run.stderr == "" and "1 rank" in run.stdout


# ---- which job -------------------------------------------------------------------------------------------------------


def job_of(run: str, pid: int, pages: int = 2) -> RunningJob:
    paths = tuple(Path(f"/proc/{pid}/fd/{number}") for number in range(pages))
    return RunningJob(run, pid, True, paths, (), frozenset([pid, pid + 1]))


def test_the_only_job_is_chosen_and_a_job_by_process_name_or_beginning() -> None:
    one, two, dark = job_of("train-10", 10), job_of("tune-20", 20), job_of("dark-30", 30, 0)
    assert choose_job([one, dark], None) is one
    for wanted in ("10", "11", "train-10", "tr"):
        assert choose_job([one, two], wanted) is one


@pytest.mark.parametrize(
    ("jobs", "wanted", "said"),
    [
        ([], None, "no job of yours runs on this host"),
        ([], "x", "has the name or the process x"),
        ([job_of("a", 10), job_of("b", 20)], None, "there are several jobs; choose one .*enginerun top 10"),
        ([job_of("ab", 10), job_of("ac", 20)], "a", "ac  \\(2 ranks\\)"),
        ([job_of("ab", 10)], "z\x1b[2J", r"process z\?\[2J; there is:\n +10  ab"),
        ([job_of("dark", 10, 0)], None, "dark .* without counting: start it without --no-metrics"),
        ([job_of("a", 10), job_of("dark", 20, 0)], "20", "without counting"),
    ],
)
def test_where_no_job_can_be_chosen_it_says_why(jobs: list[RunningJob], wanted: str | None, said: str) -> None:
    with pytest.raises(TopError, match=said):
        choose_job(jobs, wanted)


def test_without_such_a_job_the_exit_code_is_1() -> None:
    run = once("no-such-job")
    assert run.returncode == 1 and run.stdout == "" and "no job of yours on this host" in run.stderr


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf", "x", "1e9"])
def test_an_interval_that_cannot_be_is_refused(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--interval", interval])
    assert end.value.code == 2 and "is not a number of seconds from 0.1 to 3600" in capsys.readouterr().err


def test_only_the_first_argument_is_a_command_of_ours(capfd: pytest.CaptureFixture[str]) -> None:
    assert "top" in COMMANDS
    assert enginerun(["-np", "1", "top-is-no-such-program"]) == 2
    assert "'top-is-no-such-program' is not found" in capfd.readouterr().err
    with pytest.raises(SystemExit) as end:
        enginerun(["top", "--help"])
    assert end.value.code == 0 and "Watch a running job" in capfd.readouterr().out


def test_without_rich_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['rich'] = None; from engine.metrics.report.top import main; sys.exit(main([]))"
    run = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, timeout=100)
    assert (
        run.returncode == 1
        and run.stderr == "enginerun top: error: it needs rich: pip install '.[metrics]' in the source tree\n"
    )


def test_the_launcher_does_not_import_rich() -> None:
    code = "import sys, engine.launch; sys.exit(sorted({'rich', 'numpy', 'engine_ext.core'} & set(sys.modules)) or 0)"
    run = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr


# ---- drawing ---------------------------------------------------------------------------------------------------------


def drawn(frame: Frame, width: int, height: int | None) -> list[str]:
    console = Console(width=width, height=height or 1000, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(draw_frame(frame, width, height))
    return capture.get().splitlines()


def frame_with(
    pages: dict[int, Page], lags: dict[int, float] | None = None, crossing: dict[int, float] | None = None
) -> Frame:
    rates = {
        rank: Rates(1.0, 20.0, 40.0, 1e9, 0.05, 0.2, 0.1, lag, 1e6, crossing or {})
        for rank, lag in (lags or {}).items()
    }
    return Frame("a-run", JobReading(5.0, pages), rates, {}, 1000.0)


def test_the_busiest_process_sets_have_a_line_each() -> None:
    """A line says who waits in it; a terminal without room for all that shows the ranks instead."""
    names = groups_of("tp (3)", *(f"set {number}" for number in range(6)))
    fields: dict[str, Any] = {"state": 1, "group_names": names, "group_ranks": [2] * 7, "group_bytes": list(range(7))}
    pages: dict[int, Page] = {
        rank: snapshot(rank=rank, group_submitted=[0, 0, 0, 0, 0, 0, rank], **fields) for rank in range(2)
    }
    frame = frame_with(pages, {0: 0.0, 1: 0.0})
    rates = {rank: replace(each, groups={"tp (3)": GroupRates(40.0, 3e6)}) for rank, each in frame.rates.items()}
    frame = replace(frame, rates=rates)
    text = drawn(frame, 100, None)
    assert text[5:] == [
        "tp (3): 2 ranks, 40 collectives/s, 3.0 MB/s a rank",
        "set 5: 2 ranks, pending on rank 1",
        "set 4: 2 ranks",
        "set 3: 2 ranks",
        "and 3 more process sets",
        *text[10:],
    ], text
    assert "tp (3)" not in "\n".join(drawn(frame, 100, 6))
    assert "tp (3)" in "\n".join(drawn(frame, 30, None))


@pytest.mark.parametrize("width", [60, 80, 200])
def test_an_elastic_job_is_shown_by_slots_with_its_last_resets(width: int) -> None:
    """Slots 0, 2 and 3 have workers; the one in slot 2 is rank 0 of its world, and has the tuner."""
    pages: dict[int, Page] = {slot: snapshot(state=1, rank=rank) for slot, rank in ((0, 1), (2, 0), (3, 2))}
    frame = frame_with(pages, {0: 0.0, 2: 0.0, 3: 0.0})
    frame = replace(frame, now=1_700_000_090.0, elastic=replace(ELASTIC, ranks={0: 1, 2: 0, 3: -1}))
    lines = drawn(frame, width, None)
    text = " ".join(lines)
    assert "world 4: 3 ranks (2 to 6)" in text and "resets 3 in 1.5 s" in text
    assert "slow workers replaced 1" in text and "1 host left alone" in text
    assert max(map(len, lines)) <= width
    (reset,) = (line for line in lines if line.startswith("reset 3"))
    assert "reset 3, 0:01:30 ago, took 250 ms: worker 1 in slot 1 of a: was killed by SIGKILL".startswith(
        reset.rstrip()
    )
    (start,) = (number for number, line in enumerate(lines) if line.lstrip().startswith("slot"))
    assert [line.split()[0] for line in lines[start + 1 : start + 4]] == ["0", "2", "3"]
    if width == 200:
        assert [line.split()[1] for line in lines[start + 1 : start + 4]] == ["1", "0", "-"]
    resetting = drawn(replace(frame, elastic=replace(ELASTIC, resetting=True)), 200, None)
    assert "resetting after world 4" in " ".join(resetting) and "0:01:30 ago, lasts 90 s" in " ".join(resetting)


def on_two_hosts(rank: int, **fields: int | list[int]) -> Snapshot:
    name = words_of(f"node{rank // 2}")
    return snapshot(**{"state": 1, "rank": rank, "size": 4, "host": rank // 2, "hosts": 2, "host_name": name} | fields)


def test_ranks_of_several_hosts_are_shown_with_them() -> None:
    """The host whose data others wait for is named; no rank is called late for it."""
    pages: dict[int, Page] = {rank: on_two_hosts(rank, copied_ns=10**9) for rank in range(4)}
    pages[3] = on_two_hosts(3, copied_ns=10**9, copied_state=ord("T"))
    frame = frame_with(pages, dict.fromkeys(range(4), 0.0), {1: 0.5})
    text = drawn(frame, 120, None)
    assert "2 hosts" in text[0] and "most waited for: node1" in " ".join(text[:3])
    rows = [line.split() for line in text]
    assert [row[:2] for row in rows if row[:1] in (["0"], ["1"], ["2"], ["3"])] == [
        [str(rank), f"node{rank // 2}"] for rank in range(4)
    ]
    assert frame.straggler is None
    assert "slow link" not in " ".join(text[:3])
    alike = " ".join(drawn(frame_with(pages, dict.fromkeys(range(4), 0.0), {0: 0.4, 1: 0.5}), 120, None)[:3])
    assert "slow link: node0 - node1" in alike and "most waited for" not in alike
    assert "slow link" not in drawn(frame_with(pages, dict.fromkeys(range(4), 0.0), {0: 0.05, 1: 0.05}), 120, None)[0]
    old = replace(frame, reading=JobReading(11.0, pages))
    assert "node1: its figures are 10 s old" in "\n".join(drawn(old, 120, None))
    few = frame_with({rank: on_two_hosts(rank) for rank in range(2)})
    assert "ranks of other hosts are shown there" in "\n".join(drawn(few, 120, None))
    alone = frame_with({0: snapshot(state=1, rank=0, size=1)})
    assert "host" not in "\n".join(drawn(alone, 120, None))


def test_ranks_with_gpus_are_shown_with_what_they_take() -> None:
    gpu = {"state": 1, "size": 2, "gpu": 1, "device_entries": 9, "device_passed": 2}
    pages: dict[int, Page] = {0: snapshot(rank=0, **gpu), 1: snapshot(rank=1, state=1, size=2)}
    device = {"queue": 0.001, "pack": 0.002, "nccl": 0.03, "exposed": 0.004}
    frame = frame_with(pages, dict.fromkeys(range(2), 0.0))
    frame = replace(frame, rates={0: replace(frame.rates[0], device=device), 1: frame.rates[1]})
    text = drawn(frame, 200, None)
    head = next(line for line in text if "GPU work ms" in line)
    assert "on GPU" in head and "GPU queue ms" in head and "GPU exposed ms" in head
    first, second = text[text.index(head) + 1 : text.index(head) + 3]
    assert all(word in first.split() for word in ("7", "1.000", "32.000", "4.000"))
    assert "32.000" not in second
    assert "GPU" not in "\n".join(drawn(frame_with({1: pages[1]}, {1: 0.0}), 200, None))
    assert "work" in "\n".join(drawn(frame, 100, None))


@pytest.mark.sample(6)
@pytest.mark.parametrize("width", [20, 40, 79, 80, 120, 200])
@pytest.mark.parametrize("height", [6, 12, 24, 60])
def test_a_frame_of_64_ranks_fits_anywhere(width: int, height: int) -> None:
    many: dict[int, Page] = {
        n: snapshot(state=1, rank=n, size=64, worlds=1, stalled=n % 3, chunk=4096, tuner_phase=2, tuner_trials=5)
        for n in range(64)
    }
    lines = drawn(frame_with(many, {n: n / 1000 for n in range(64)}), width, height)
    assert max(map(len, lines)) <= width
    assert len(lines) < height
    assert any(line.split()[0] == "63" for line in lines if line.strip()), "the slowest"


def test_the_slowest_and_the_broken_are_shown_where_there_is_no_room_for_all() -> None:
    many: dict[int, Page] = {n: snapshot(state=1, rank=n, size=64, worlds=1, chunk=4096) for n in range(64)}
    many[7] = PageError("is damaged")
    many[9] = snapshot(state=3, rank=9, size=64, worlds=1, cause=1, culprit=10)
    lags = dict.fromkeys(range(64), 0.001) | {33: 0.04}
    lines = drawn(frame_with(many, lags), 80, 24)
    assert len(lines) < 24
    rows = [line.split() for line in lines if line.rstrip().endswith(("running", "failed", "unreadable"))]
    assert {"7", "9", "33"} <= {row[0] for row in rows}
    assert [line for line in lines if "40.00 <" in line and line.lstrip().startswith("33")], "marked as the straggler"
    assert f"{64 - len(rows)} ranks that are no slower are not shown" in "\n".join(lines)
    assert "rank 9: failed: rank 9 died" in lines


def test_a_name_cannot_draw_on_the_terminal() -> None:
    frame = Frame("evil\x1b[2J[red]\n", JobReading(0.0, {0: None}), {}, {}, 0.0)
    assert "evil?[2J[red]?" in drawn(frame, 80, 24)[0] and "evil?[2J[red]?" in describe_end(frame)


def test_pages_of_odd_numbers_are_drawn() -> None:
    names = "state size worlds started_ns tuner_phase cause culprit stalled stores chunk compression tuner_best_ps pid"
    odd = snapshot(**dict.fromkeys(names.split(), 2**64 - 1))
    assert max(map(len, drawn(frame_with({0: odd}, {0: 0.0}), 80, 24))) <= 80
    assert describe_end(frame_with({0: odd}))
