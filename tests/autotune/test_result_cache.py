"""Cache of search results: which job is offered which result, and arbitrary files in its directory."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from autotune import cli, result_cache
from autotune.result_cache import JobKind, Known

from ..waiting import until

JOB = JobKind("a1b2", 60, 100_000_000, 4, 1, "shm", "A processor", 8, "0.1", {})
FOUND = Known(JOB, {"fusion_threshold": 1 << 20, "cycle_time_ms": 0.5, "stores": "cached"}, 0.11, 0.04, 30)


def nothing(job: JobKind = JOB) -> Known:
    return replace(FOUND, job=job, knobs={"cycle_time_ms": 5.0}, gain=None, sure=None)


def recalled(home: Path, job: JobKind = JOB) -> tuple[Known | None, str]:
    found, why, skipped = result_cache.find_result(home, job)
    assert skipped == []
    return found, why


def test_a_result_is_recalled_as_it_was_and_is_private_and_can_be_read(tmp_path: Path) -> None:
    home = tmp_path / "a" / "b"
    assert recalled(home) == (None, "nothing is known of this job, nor of one like it")
    result_cache.store_result(home, FOUND)
    found, why = recalled(home)
    assert found == FOUND
    assert why == f"this job: on {FOUND.when[:10]} a step took 11% less time than by default"
    (path,) = home.iterdir()
    assert path.name == JOB.file and home.stat().st_mode & 0o777 == 0o700 and path.stat().st_mode & 0o777 == 0o600
    content = json.loads(path.read_text())
    assert (
        content["schema"] == result_cache.SCHEMA and content["job"] == asdict(JOB) and content["knobs"] == FOUND.knobs
    )
    assert len(path.read_text().splitlines()) > 20


# Results that are offered

BIGGER = replace(JOB, model="b", bytes=400_000_000)
NEARER_LAST = [  # each one is offered before those above it
    replace(JOB, model="c", bytes=50),
    BIGGER,
    replace(BIGGER, bytes=200_000_000, held={"stores": "auto"}),
    replace(BIGGER, bytes=200_000_000),
    replace(JOB, processor="Another", ranks=64),
    replace(JOB, processor="Another"),
    replace(JOB, ranks=64),
    replace(JOB, ranks=2, version="0.0"),
    replace(JOB, ranks=2),
    replace(JOB, held={"stores": "auto"}),
    JOB,
]
UNLIKE = [
    replace(BIGGER, ranks=3),
    replace(BIGGER, processor="Another"),
    replace(BIGGER, cpus=2),
    replace(JOB, transport="tcp"),
    replace(BIGGER, transport="tcp"),
]


def test_the_nearest_result_is_offered(tmp_path: Path) -> None:
    for job in UNLIKE:
        result_cache.store_result(tmp_path, replace(FOUND, job=job))
    assert recalled(tmp_path)[0] is None
    for k, job in enumerate(NEARER_LAST):
        result_cache.store_result(tmp_path, replace(FOUND, job=job, trials=k))
        found, why = recalled(tmp_path)
        assert found is not None and found.trials == k, why
    assert len(list(tmp_path.iterdir())) == len(UNLIKE) + len(NEARER_LAST)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (replace(JOB, ranks=2), "the same model, on 2 ranks: on "),
        (replace(JOB, processor="Another"), "the same model, on 8 CPUs of Another: on "),
        (replace(JOB, held={"a": 1}, version="0"), "the same model, with other knobs held, with version 0: on "),
        (replace(JOB, model="b", bytes=4_000_000), "another model, of 4 MB and not 100 MB: on "),
    ],
)
def test_how_alike_the_jobs_are_is_told(other: JobKind, says: str, tmp_path: Path) -> None:
    result_cache.store_result(tmp_path, replace(FOUND, job=other))
    assert recalled(tmp_path)[1].startswith(says)


def test_of_equally_near_results_the_newest_is_offered(tmp_path: Path) -> None:
    for hour, ranks in ((3, 2), (5, 8), (4, 2)):
        when = f"2026-01-01T0{hour}:00:00+00:00"
        result_cache.store_result(tmp_path, replace(FOUND, job=replace(JOB, ranks=ranks), trials=hour, when=when))
    found = recalled(tmp_path)[0]
    assert found is not None and found.trials == 5


def test_that_nothing_was_better_is_offered_to_the_very_job_alone(tmp_path: Path) -> None:
    result_cache.store_result(tmp_path, nothing(replace(JOB, ranks=2)))
    assert recalled(tmp_path)[0] is None
    result_cache.store_result(tmp_path, replace(FOUND, job=replace(JOB, ranks=64)))
    assert recalled(tmp_path)[0] is not None
    result_cache.store_result(tmp_path, nothing())
    found, why = recalled(tmp_path)
    assert found is not None and found.knobs == nothing().knobs and "nothing was proven better" in why


def test_what_was_proven_is_given_up_after_three_searches_that_prove_nothing(tmp_path: Path) -> None:
    result_cache.store_result(tmp_path, FOUND)
    for k in (1, 2):
        result_cache.store_result(tmp_path, nothing())
        assert recalled(tmp_path)[0] == replace(FOUND, fruitless=k)
    result_cache.store_result(tmp_path, FOUND)  # a proof resets the count
    for _ in range(3):
        result_cache.store_result(tmp_path, nothing())
    found = recalled(tmp_path)[0]
    assert found is not None and found.gain is None
    result_cache.store_result(tmp_path, FOUND)
    assert recalled(tmp_path)[0] == FOUND


# Files that may be in the directory


def written(home: Path, changes: dict[str, Any], job: JobKind = JOB) -> Path:
    """Return a written result with some fields changed."""
    result_cache.store_result(home, replace(FOUND, job=job))
    path = home / job.file
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"schema": 2}, "it is of schema 2, not 1: a newer version has written it"),
        ({"schema": None}, "it is of schema None, not 1"),
        ({"schema": "1"}, "it is of schema '1', not 1"),
        ({"job": []}, "it is no result of a search"),
        ({"job": {}}, "missing 10 required positional arguments"),
        ({"job": {**asdict(JOB), "ranks": True}}, "'ranks' is True, and no number of at least 1"),
        ({"job": {**asdict(JOB), "ranks": 0}}, "'ranks' is 0, and no number"),
        ({"job": {**asdict(JOB), "bytes": 10**400}}, "the whole number 1000"),
        ({"job": {**asdict(JOB), "model": "../x"}}, "'model' is '../x', and not up to 16 hexadecimal digits"),
        ({"job": {**asdict(JOB), "held": {"a": []}}}, "'held' has a=[], and neither"),
        ({"job": {**asdict(JOB), "ranks": 5}}, "it holds what belongs into a1b2-5-"),
        ({"more": 1}, "unexpected keyword argument 'more'"),
        ({"\x1b[2J\n": 1}, "unexpected keyword argument '?[2J?'"),
        ({"log": ["x" * 9000]}, "'log' is ['xxx"),
        ({"knobs": None}, "'knobs' is None, and no object"),
        ({"knobs": {"stores": None}}, "'knobs' has stores=None, and neither a number nor a text"),
        ({"knobs": {"stores": "\x1b[2J"}}, "'knobs' has stores="),
        ({"gain": "much", "sure": 0}, "'gain' is 'much', and no share"),
        ({"gain": 1.0}, "'gain' is 1.0, and no share"),
        ({"sure": None}, "'gain' is 0.11, and 'sure' None"),
        ({"trials": 2.5}, "'trials' is 2.5, and no number of at least 0"),
        ({"fruitless": -1}, "'fruitless' is -1"),
        ({"when": "yesterday"}, "Invalid isoformat string: 'yesterday'"),
        ({"when": "2026-01-01"}, "without a time zone"),
        ({"when": 3}, "'when' is 3, and no text"),
        ({"log": 3}, "'log' is 3, and no path"),
        ({"versions": [3]}, "'versions' is [3], and no object"),
    ],
)
def test_a_result_that_makes_no_sense_is_skipped_with_its_reason(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = written(tmp_path, changes)
    found, _, skipped = result_cache.find_result(tmp_path, JOB)
    assert found is None
    assert len(skipped) == 1 and skipped[0].startswith(f"{path}: ") and says in skipped[0]
    assert len(skipped[0]) <= len(f"{path}: ") + result_cache.SHOWN
    result_cache.store_result(tmp_path, nothing())  # replaces the other
    assert recalled(tmp_path)[0] == nothing()


def test_junk_of_any_kind_is_skipped_and_hides_no_result(tmp_path: Path) -> None:
    rng = random.Random(0)
    good = replace(JOB, ranks=2)
    result_cache.store_result(tmp_path, replace(FOUND, job=good))
    whole = (tmp_path / good.file).read_bytes()
    kinds = [
        lambda: b"",
        lambda: rng.randbytes(rng.randrange(1, 400)),
        lambda: whole[: rng.randrange(len(whole) - 2)],  # truncated
        lambda: whole.replace(rng.choice([b'"', b"{", b":", b"1", b"a"]), rng.choice([b"", b"[", b"\0", b"NaN"])),
        lambda: b"[" * 100_000,
        lambda: b"{" * 60_000,
        lambda: b" " * (result_cache.LARGEST + 1),
        lambda: json.dumps(rng.choice([None, 1, "x", [1], {"a": 1}, {"job": 3}])).encode(),
        lambda: b'{"schema": 1, "job": {}, "knobs": NaN}',
    ]
    paths = [tmp_path / f"{k:x}-2-{rng.randrange(16**12):012x}.json" for k in range(120)]
    for k, path in enumerate(paths):
        path.write_bytes(kinds[k % len(kinds)]())
    (tmp_path / "a-1-000000000000.json").mkdir()
    os.mkfifo(tmp_path / "a-2-000000000000.json")
    (tmp_path / "a-3-000000000000.json").symlink_to("/nowhere")
    (tmp_path / "a-4-000000000000.json").symlink_to("/dev/zero")
    (tmp_path / "other.json").write_text("not ours, and not looked at")
    found, _, skipped = result_cache.find_result(tmp_path, JOB)
    assert found is not None and found.job == good
    # A dangling link counts as no file.
    assert len(skipped) == len(paths) + 3 and all(os.fspath(tmp_path) in each for each in skipped)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_what_may_not_be_read_or_written_is_told(tmp_path: Path) -> None:
    result_cache.store_result(tmp_path, FOUND)
    (tmp_path / JOB.file).chmod(0)
    assert result_cache.find_result(tmp_path, JOB)[2] == [f"{tmp_path / JOB.file}: Permission denied"]
    result_cache.store_result(tmp_path, FOUND)  # replaces the file
    assert recalled(tmp_path)[0] == FOUND
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError):
            result_cache.store_result(tmp_path, nothing())
    finally:
        tmp_path.chmod(0o700)
    assert recalled(tmp_path)[0] == FOUND
    assert [path.name for path in tmp_path.iterdir()] == [JOB.file]


def test_the_oldest_go_and_what_is_not_ours_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_cache, "MOST", 5)
    others = ["notes.json", ".a-1-000000000000.xyz.tmp", ".other.tmp"]  # the second is being written
    for name in others:
        (tmp_path / name).touch()
    left = tmp_path / ".a-1-000000000000.abc.tmp"
    left.touch()
    os.utime(left, (1.0, 1.0))
    for ranks in range(1, 9):
        job = replace(JOB, ranks=ranks)
        result_cache.store_result(tmp_path, replace(FOUND, job=job))
        os.utime(tmp_path / job.file, (100.0 + ranks, 100.0 + ranks))
    results, _ = result_cache.read(tmp_path)
    assert sorted(each.job.ranks for each in results) == [4, 5, 6, 7, 8]
    left = (path.name for path in tmp_path.iterdir() if not result_cache.NAMES.fullmatch(path.name))
    assert sorted(left) == sorted(others)
    assert result_cache.remove_results(tmp_path) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)
    assert result_cache.remove_results(tmp_path / "none") == 0


WRITER = """
import sys
from dataclasses import replace
from pathlib import Path
from tests.autotune.test_result_cache import FOUND
from autotune import result_cache
print("ready", flush=True)
sys.stdin.read(1)
home, number, end = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
k = 0
while k < 150 or not end.exists():
    found = replace(FOUND, trials=1000 * number + k % 900, log="x" * (1 + k * 97 % 8000))
    result_cache.store_result(home, found)
    k += 1
result_cache.store_result(home, replace(FOUND, trials=1000 * number + 999))
"""


@pytest.mark.slow
def test_jobs_that_write_at_once_leave_one_whole_result(tmp_path: Path) -> None:
    home, end = tmp_path / "home", tmp_path / "end"
    command = [sys.executable, "-P", "-c", WRITER, str(home)]
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(Path(__file__).parents[2])])
    environ = {**os.environ, "PYTHONPATH": path}
    result_cache.store_result(home, FOUND)
    writers = [
        subprocess.Popen([*command, str(k), str(end)], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for k in range(3)
    ]
    for each in writers:
        assert each.stdout is not None and each.stdout.readline() == b"ready\n"
    for each in writers:
        assert each.stdin is not None
        each.stdin.write(b"x")
        each.stdin.flush()
    seen = set()

    def read() -> None:
        found, _ = recalled(home)  # never half a file
        assert found is not None
        seen.add(found.trials)

    def written() -> bool:
        read()
        if len(seen) > 3:  # read while they were writing
            end.touch()
        return all(each.poll() is not None for each in writers)

    until(written, "the writers have ended", 100.0, pause=0)
    assert [each.returncode for each in writers] == [0, 0, 0]
    for each in writers:
        each.communicate()
    found, _ = recalled(home)
    assert found is not None and found.trials % 1000 == 999
    assert [path.name for path in home.iterdir()] == [JOB.file]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"XDG_CACHE_HOME": "/c", "HOME": "/h"}, "/c/enginerun/autotune"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/enginerun/autotune"),
        ({"HOME": "/h"}, "/h/.cache/enginerun/autotune"),
    ],
)
def test_the_directory_is_the_users(environ: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert result_cache.get_default_directory() == Path(expected)


def test_the_command_lists_and_forgets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["known", "--cache", str(tmp_path)]
    assert cli.main(options) == 0
    assert capsys.readouterr().out == f"0 results in {tmp_path}\n"
    result_cache.store_result(tmp_path, FOUND)
    result_cache.store_result(tmp_path, nothing(replace(JOB, model="beef", held={"stores": "[red]"})))
    path = written(tmp_path, {"schema": 7}, replace(JOB, ranks=3))
    assert cli.main(options) == 0
    shown, errors = capsys.readouterr()
    told = shown.replace("\n", "").replace(" ", "")  # the table is as narrow as the terminal
    for each in ("a1b2", "beef", "11%", "nothing"):
        assert each in told
    assert shown.endswith(f"2 results in {tmp_path}\n") and f"not used: {path}: it is of schema 7" in errors
    assert cli.main([*options, "--forget"]) == 0
    assert capsys.readouterr().out == f"3 results removed from {tmp_path}\n"
    assert list(tmp_path.iterdir()) == []
    path.touch()
    assert cli.main(["known", "--cache", str(path)]) == 2
    assert "Not a directory" in capsys.readouterr().err
