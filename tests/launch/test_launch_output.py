"""Display and storage of ranks' output."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.host import machine

from ..waiting import until
from .launch_jobs import DEADLINE


def test_prefixes_on_the_console_and_raw_bytes_in_files(launcher, tmp_path):
    job = launcher.run(
        "-np", 2, "--output-dir", tmp_path / "out", python="print('hello', rank); print('oh', rank, file=sys.stderr)"
    )
    assert job.code == 0
    for rank in (0, 1):
        assert job.lines(rank) == [f"hello {rank}"]
        assert job.lines(rank, "stderr") == [f"oh {rank}"]
        home = tmp_path / f"out/rank.{rank}"
        assert (home / "stdout").read_text() == f"hello {rank}\n"
        assert (home / "stderr").read_text() == f"oh {rank}\n"
        assert (home / "stdout").stat().st_mode & 0o777 == 0o600
        assert home.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_is_used_again_holds_the_new_job_alone(launcher, tmp_path):
    out = tmp_path / "out"
    for stale in ("failure.json", "flight.json", "stdout"):
        (out / "rank.0").mkdir(parents=True, exist_ok=True)
        (out / "rank.0" / stale).write_text('{"rank": 1, "cause": "died", "message": "old", "time": 1}')
    job = launcher.run("-np", 2, "--output-filename", out, python="print('new'); sys.exit(3 * (rank == 0))")
    assert job.code == 3
    assert "rank 0 " in job.failure[0]
    assert sorted(path.name for path in (out / "rank.0").iterdir()) == ["stderr", "stdout"]
    assert (out / "rank.0/stdout").read_text() == "new\n"


def test_two_jobs_do_not_share_a_directory(launcher, tmp_path):
    first = launcher.start("-np", 1, "--output-dir", tmp_path / "out", python="touch('up'); wait_for('end')")
    launcher.wait_for("up")
    second = launcher.run("-np", 1, "--output-dir", tmp_path / "out", "true")
    assert second.code == 2
    assert "in use by another job" in second.err
    (tmp_path / "end").touch()
    assert launcher.finish(first).code == 0


def test_ranks_that_write_by_halves_never_share_a_line(launcher):
    job = launcher.run(
        "-np",
        4,
        python="""
            for number in range(60):
                for part in (f"<{rank}", f"-{number}", "-" * 50, f"-{number}-{rank}>\\n"):
                    os.write(1, part.encode())
        """,
    )
    assert job.code == 0
    for rank in range(4):
        assert job.lines(rank) == [f"<{rank}-{number}{'-' * 50}-{number}-{rank}>" for number in range(60)]
    assert all(re.match(r"\[\d\]<stdout>:<", line) for line in job.out.splitlines())


def test_a_last_line_without_newline_is_shown_as_a_line(launcher):
    job = launcher.run("-np", 2, python="os.write(1, b'no end'); os.write(2, b'none here')")
    assert sorted(job.out.split("\n")) == ["", "[0]<stdout>:no end", "[1]<stdout>:no end"]
    assert job.lines(1, "stderr") == ["none here"]


def test_long_lines_stay_whole(launcher):
    job = launcher.run("-np", 2, python="sys.stdout.write('ab'[rank] * 3_000_000 + '\\n')")
    assert [job.lines(rank) for rank in (0, 1)] == [["a" * 3_000_000], ["b" * 3_000_000]]


def test_binary_junk_passes_and_is_kept_as_it_is(launcher, tmp_path):
    junk = bytes(range(256)) * 40 + b"\xff\xfe\n\x00"
    (tmp_path / "junk").write_bytes(junk)
    job = launcher.run(
        "-np",
        2,
        "--output-dir",
        tmp_path / "out",
        python="os.write(1, (here / 'junk').read_bytes()); os.write(1, b'\\nend\\n')",
    )
    assert job.code == 0
    for rank in (0, 1):
        assert (tmp_path / f"out/rank.{rank}/stdout").read_bytes() == junk + b"\nend\n"
        assert job.lines(rank)[-1] == "end"


def test_a_progress_bar_does_not_flood(launcher, tmp_path):
    job = launcher.run(
        "-np",
        2,
        "--output-dir",
        tmp_path / "out",
        python="""
            for step in range(3000): os.write(2, b"\\rstep %d" % step)
            os.write(2, b"\\n")
        """,
    )
    for rank in (0, 1):
        lines = job.lines(rank, "stderr")
        assert lines[-1] == "step 2999"
        assert len(lines) <= 30, "one now and then"
        assert (tmp_path / f"out/rank.{rank}/stderr").read_bytes().count(b"\r") == 3000


def test_much_output_comes_whole_and_soon(launcher):
    began = time.monotonic()
    job = launcher.run(
        "-np",
        4,
        python="""
            block = "".join(f"{rank} {number:06d} {'x' * 60}\\n" for number in range(1000))
            for _ in range(100): sys.stdout.write(block)
        """,
    )
    spent = time.monotonic() - began
    assert job.code == 0
    for rank in range(4):
        lines = job.lines(rank)
        assert len(lines) == 100_000
        assert lines[999] == f"{rank} 000999 {'x' * 60}"
    assert spent < 90, "28 MB took longer than 90 s"


def test_a_reader_that_pauses_does_not_stop_the_ranks_and_loses_nothing(launcher):
    process = launcher.start(
        "-np",
        2,
        python="[print(rank, number, 'x' * 100) for number in range(100_000)]; touch(f'done.{rank}'); wait_for('end')",
    )
    launcher.wait_for("done.0", "done.1")  # more than 20 MB written, and not a byte read
    (launcher.home / "end").touch()
    job = launcher.finish(process)
    assert job.code == 0
    for rank in (0, 1):
        assert job.lines(rank) == [f"{rank} {number} {'x' * 100}" for number in range(100_000)]


def test_a_reader_that_goes_away_does_not_end_the_training(launcher):
    process = launcher.start("-np", 2, python="print('x'); wait_for('closed'); print('y'); touch(f'done.{rank}')")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    (launcher.home / "closed").touch()
    launcher.wait_for("done.0", "done.1")
    assert process.stderr is not None
    err = process.stderr.read().decode()
    assert process.wait(DEADLINE) == 0
    assert "nobody reads it" in err
    [kept] = launcher.kept()
    assert (kept / "rank.0/stdout").read_text() == "x\ny\n"


def test_timestamps(launcher):
    job = launcher.run("-np", 1, "--prefix-output-with-timestamp", python="print('a'); print('b')")
    lines = job.out.splitlines()
    assert len(lines) == 2
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\[0\]<stdout>:[ab]", line) for line in lines)


def test_colour_on_a_terminal_only(launcher):
    ours, theirs = pty.openpty()
    process = launcher.start("-np", 1, stdout=theirs, python="print('hello')")
    os.close(theirs)
    assert process.stderr is not None
    process.stderr.read()
    assert process.wait(DEADLINE) == 0
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed, and all is read
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    assert shown == b"\x1b[36m[0]<stdout>:\x1b[0mhello\r\n"
    assert "\x1b" not in launcher.run("-np", 1, python="print('hello')").out


def test_python_in_ranks_does_not_buffer_unless_the_user_wants_it(launcher):
    show = "print('PYTHONUNBUFFERED', os.environ['PYTHONUNBUFFERED'] or 'empty')"
    assert launcher.run("-np", 1, python=show).lines(0) == ["PYTHONUNBUFFERED 1"]
    launcher.environment["PYTHONUNBUFFERED"] = ""
    assert launcher.run("-np", 1, python=show).lines(0) == ["PYTHONUNBUFFERED empty"]


def test_a_grandchild_that_holds_the_pipes_does_not_hold_the_launcher(launcher):
    asleep = "until grep -q sleep /proc/$!/comm; do :; done"  # before that it has the shell's name
    job = launcher.run("-np", 2, "sh", "-c", f"sleep 600 & {asleep}; echo done")
    assert job.code == 0
    assert job.lines(0) == job.lines(1) == ["done"]
    assert "ending what the ranks left behind: sleep" in job.err


def test_a_dead_ranks_last_words_are_shown_while_a_grandchild_holds_its_pipe(launcher):
    process = launcher.start(
        "-np",
        2,
        python="""
            if rank == 0:
                subprocess.Popen(["sleep", "600"])
                os.write(1, b"last words")
            else:
                wait_for("end")
        """,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"[0]<stdout>:last words\n"
    (launcher.home / "end").touch()
    assert launcher.finish(process).code == 0


def test_a_stream_that_a_rank_closes_shows_its_last_words(launcher):
    job = launcher.run("-np", 1, python="os.write(1, b'closing'); os.close(1); touch('closed'); wait_for('closed')")
    assert job.lines(0) == ["closing"]


def test_ranks_get_no_input(launcher):
    assert launcher.run("-np", 1, python="print(repr(sys.stdin.read()))").lines(0) == ["''"]


def test_every_rank_is_told_its_place(launcher):
    names = "ENGINE_RANK ENGINE_SIZE ENGINE_LOCAL_RANK ENGINE_LOCAL_SIZE RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE"
    job = launcher.run(
        "-np",
        2,
        "--cycle-time-ms",
        3,
        python=f"""
            print(*(os.environ[name] for name in "{names} MASTER_ADDR".split()))
            print(os.environ["ENGINE_JOB"], os.environ["ENGINE_SECRET"], os.environ["MASTER_PORT"])
            home = os.environ["ENGINE_OUTPUT_DIR"] + f"/rank.{{rank}}"
            print(os.environ["ENGINE_CYCLE_TIME_MS"], os.path.isdir(home))
        """,
    )
    (first, shared, settings), (second, *others) = job.lines(0), job.lines(1)
    assert first == "0 2 0 2 0 0 2 2 127.0.0.1"
    assert second == "1 2 1 2 1 1 2 2 127.0.0.1"
    assert others == [shared, settings]
    assert settings == "3 True"
    name, secret, port = shared.split()
    assert len(bytes.fromhex(secret)) == 32
    assert 1024 <= int(port) < 65536
    again = launcher.run("-np", 1, python="print(os.environ['ENGINE_JOB'], os.environ['ENGINE_SECRET'])").lines(0)
    assert not {name, secret} & set(again[0].split())


def test_the_secret_is_in_no_command_line(launcher):
    process = launcher.start("-np", 1, python="print(os.environ['ENGINE_SECRET']); touch('up'); wait_for('end')")
    launcher.wait_for("up")
    assert process.stdout is not None
    secret = process.stdout.readline().split(b":")[1].strip()
    shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, check=True).stdout
    (launcher.home / "end").touch()
    assert launcher.finish(process).code == 0
    assert secret not in shown


def test_binding_and_its_refusal(launcher):
    cpus = sorted(os.sched_getaffinity(0))
    show = "print(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])"
    free = launcher.run("-np", 1, "--no-binding", python=show)
    assert free.lines(0) == [f"{cpus} {machine.collect_facts().usable}"]
    assert "not bound (--no-binding)" in free.err.splitlines()[0]
    bound = launcher.run("-np", 1, "--cpus-per-rank", 1, python=show)
    assert re.fullmatch(r"\[\d+\] 1", bound.lines(0)[0])


def test_quiet_says_nothing_when_all_goes_well(launcher):
    assert launcher.run("-np", 2, "--quiet", python="print('x')").err == ""


def test_verbose_says_what_is_started(launcher):
    err = launcher.run("-np", 2, "--verbose", "--", "true").err
    assert len(re.findall(r"^enginerun: rank [01]: pid \d+, ", err, re.MULTILINE)) == 2


def test_errors_of_the_command_line_are_one_line_and_exit_with_2(launcher, tmp_path):
    (tmp_path / "plain.py").touch()
    (tmp_path / "gone").write_text("#!/no/such/interpreter\n")
    (tmp_path / "gone").chmod(0o755)
    (tmp_path / "noformat").write_text("nothing\n")
    (tmp_path / "noformat").chmod(0o755)
    for arguments, message in (
        ((), "no command to run"),
        (("-np", 0, "true"), "'0' is not a whole number from 1 to 1048576"),
        (("-np", 2, "nosuchcommand"), "'nosuchcommand' is not found on PATH"),
        (("-np", 2, "./missing.sh"), "'./missing.sh' does not exist"),
        (("-np", 2, "./plain.py"), "'./plain.py' is not executable: write 'python ./plain.py'"),
        (("-np", 2, "plain.py"), "'plain.py' is not executable: write 'python plain.py'"),
        (("-np", 2, "gone"), "'gone' is here, but not on PATH: write './gone'"),
        (("-np", 2, "./gone"), "the interpreter in its first line"),
        (("-np", 2, "./noformat"), "needs a first line that names its interpreter"),
        (("-np", 2, tmp_path), "is a directory"),
        (("-np", 2, "--output-dir", tmp_path / "gone", "true"), "no directory for the job's files"),
    ):
        job = launcher.run(*arguments)
        said = [line for line in job.err.splitlines() if not re.match(r"enginerun: \d+ ranks? on", line)]
        assert (job.code, len(said)) == (2, 1), job
        assert message in said[0]
        assert said[0].startswith("enginerun: error: ")
    assert launcher.kept() == []


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("ENGINE_CHUNK_BYTES", "2M", "a number of bytes from 4096 to 1048576, such as 512K"),
        ("HOROVOD_CYCLE_TIME", "fast", "a number from 0 to 10000"),
        ("ENGINE_KERNELS", "sse", "one of auto, plain, avx2, avx512"),
    ],
)
def test_a_setting_that_ranks_would_refuse_is_refused_before_one_starts(launcher, variable, value, expected):
    launcher.environment[variable] = value
    job = launcher.run("-np", 2, python="touch('ran')")
    assert (job.code, job.err) == (2, f"enginerun: error: {variable} is {value!r}; expected {expected}\n")
    assert not (launcher.home / "ran").exists() and launcher.kept() == []


def test_it_runs_without_the_extension_and_imports_nothing_heavy(launcher):
    check = (
        "import sys, engine.launch.cli, engine.launch.job; native = ('engine_ext.core', 'engine_ext.setup'); "
        "print([m for m in (*native, 'numpy', 'torch', 'asyncio', 'threading') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", check], env=launcher.environment, capture_output=True, check=True)
    assert found.stdout.strip() in (b"[]", b"['threading']")


def test_a_rank_that_ends_early_ends_nothing(launcher):
    process = launcher.start("-np", 2, python="rank or wait_for('end'); touch(f'done.{rank}')")
    launcher.wait_for("done.1")
    (launcher.home / "end").touch()
    job = launcher.finish(process)
    assert job.code == 0
    until((launcher.home / "done.0").exists, "rank 0 to its end")


def modes_below(directory: Path) -> dict[str, int]:
    return {str(path.relative_to(directory)): stat.S_IMODE(path.lstat().st_mode) for path in directory.rglob("*")}


def test_files_and_directories_that_exist_get_private_modes(launcher, tmp_path):
    out = tmp_path / "out"
    for directory in (out, out / "rank.0"):
        directory.mkdir()
        directory.chmod(0o755)
    for name in ("stdout", "stderr", "failure.json", "stacks.txt"):
        (out / "rank.0" / name).write_text("of before")
        (out / "rank.0" / name).chmod(0o644)
    assert launcher.run("-np", 2, "--output-dir", out, python="engine.init(); raise ValueError('now')").code == 1
    found = modes_below(out)
    assert {0o700 if (out / name).is_dir() else 0o600 for name in found} == {0o700, 0o600}
    assert found == {name: 0o700 if (out / name).is_dir() else 0o600 for name in found}
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    assert "now" in (out / "rank.0/stderr").read_text() and "of before" not in (out / "rank.0/stderr").read_text()


def test_a_directory_with_other_files_keeps_its_mode(launcher, tmp_path):
    out = tmp_path / "project"
    out.mkdir()
    out.chmod(0o755)
    (out / "train.py").touch(0o644)
    assert launcher.run("-np", 1, "--output-dir", out, "true").code == 0
    assert stat.S_IMODE(out.stat().st_mode) == 0o755
    assert modes_below(out) == {"train.py": 0o644, "rank.0": 0o700, "rank.0/stdout": 0o600, "rank.0/stderr": 0o600}


def lay_traps(out: Path, how: str, victim: Path) -> None:
    """Prepare a job's output directory as another user might: links, foreign owners, open permissions."""
    (out / "rank.0").mkdir(parents=True)
    if how == "file":
        (out / "rank.0/stdout").symlink_to(victim)
    elif how == "rank's directory":
        (out / "rank.0").rmdir()
        (out / "rank.0").symlink_to(victim.parent)
    elif how == "another's":
        os.chown(out, 65534, 65534)
    elif how == "another's, for a rank":
        os.chown(out / "rank.0", 65534, 65534)
    elif how == "writable":
        out.chmod(0o777)
    elif how == "link":
        out.rename(out.with_name("real"))
        out.symlink_to("real")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("file", None),
        ("rank's directory", "it is a symbolic link, which is not followed"),
        ("another's", "it belongs to another user (uid 65534"),
        ("another's, for a rank", "it belongs to another user (uid 65534"),
        ("writable", "other users can write to this directory"),
        ("link", "it is a symbolic link, which is not followed"),
    ],
)
def test_what_others_have_prepared_in_an_output_directory_is_not_used(launcher, tmp_path, how, said):
    if "another" in how and os.geteuid() != 0:
        pytest.skip("only root can give files to another user")
    victim, out = tmp_path / "home" / "stdout", tmp_path / "out"
    victim.parent.mkdir()
    victim.write_text("dear")
    lay_traps(out, how, victim)
    for options in ((), ("-H", "localhost:1"), ("--min-np", 1)):
        job = launcher.run("-np", 1, "--output-dir", out, *options, "echo", "written")
        assert victim.read_text() == "dear" and [*victim.parent.iterdir()] == [victim]
        if said is None:
            assert set((out / "rank.0/stdout").read_text().split()) == {"written"}
        else:
            assert job.code == 2 and said in job.err, job.err


def test_records_of_more_ranks_of_an_earlier_job_are_not_taken_for_this_ones(launcher, tmp_path):
    out = tmp_path / "out"
    for rank in (1, 2):
        (out / f"rank.{rank}").mkdir(parents=True)
        for name in ("failure.json", "flight.json"):
            (out / f"rank.{rank}" / name).write_text("{}")
    job = launcher.run("-np", 2, "--output-dir", out, "true")
    assert job.code == 0
    assert "flight records" not in job.err
    assert not [*out.glob("rank.*/*.json")]


def test_old_directories_of_jobs_are_cleared_and_nothing_else(launcher, tmp_path):
    month_ago = time.time() - 31 * 24 * 3600

    def directory(name, *, old=True, mode=0o700, file="stdout"):
        home = launcher.temporary / name
        (home / "rank.0").mkdir(parents=True)
        (home / "rank.0" / file).write_text("text")
        home.chmod(mode)
        for path in (home / "rank.0" / file, home / "rank.0", home) if old else ():
            os.utime(path, (month_ago, month_ago))
        return home

    directory("enginerun-forgotten")
    directory("engine-records-forgotten", file="flight.json")  # left by a rank without enginerun
    worker = directory("engine-records-of-a-worker/world.3", file="flight.json").parent  # left by a killed worker
    worker.chmod(0o700)
    os.utime(worker, (month_ago, month_ago))
    others = directory("engine-records-others", file="flight.json")  # another program's, as its content shows
    (others / "model").touch()
    for path in (others / "model", others):
        os.utime(path, (month_ago, month_ago))
    kept = {directory("enginerun-new", old=False), directory("other-old"), directory("enginerun-open", mode=0o755)}
    written = directory("enginerun-written")  # its directories are old, but a rank still writes
    os.utime(written / "rank.0/stdout")
    held = directory("enginerun-held")
    target = directory("target")
    link = launcher.temporary / "enginerun-link"
    link.symlink_to(target)
    os.utime(link, (month_ago, month_ago), follow_symlinks=False)
    kept |= {written, held, target, link, others, directory("engine-records-new", old=False, file="flight.json")}
    kept |= {directory("engine-experiment"), directory("engine-records-of-a-user")}  # chosen with --output-dir
    if os.geteuid() == 0:
        foreign = directory("enginerun-foreign")
        os.chown(foreign, 65534, 65534)
        kept.add(foreign)
    holder = os.open(held, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    try:
        assert launcher.run("-np", 1, "true").code == 0
    finally:
        os.close(holder)
    assert set(launcher.kept()) == kept
    assert (target / "rank.0/stdout").exists()
