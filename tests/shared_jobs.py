"""pytest plugin for tests on ranks (on_ranks.py): their ids, their order, and the jobs that they share.

A job starts with its first test, and gets all chosen tests at once. The outcome of a test is reported under the test's
id as soon as all ranks have written it. When a job ends too early, or a test takes too long, that test fails, and new
ranks go on with the next one; but only so often, since a broken engine would end each of them.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from . import on_ranks
from .on_ranks import BEGUN, FAILED, OUTCOMES, SKIPPED, Case, Ranks
from .ranks import Job, RanksFailed, start_ranks
from .waiting import SLOWNESS, NotWithin, until
from .workers import find_part

STALLED = {"ENGINE_STALL_LIMIT": f"{45 * SLOWNESS:g}"}  # a missing rank becomes an error, in time for the report
START = 300  # seconds for a job's first test, during which ranks import their frameworks
STARTS = 4  # times that a job is started, before its remaining tests fail
Key = tuple[str, Ranks]


def case_of(item: pytest.Function) -> Case:
    """Return the form in which a test is sent to ranks."""
    mark = item.get_closest_marker("on_ranks")
    assert mark is not None
    parameters = {name: value for name, value in item.callspec.params.items() if name != "ranks"}
    return Case(item.module.__name__, item.function.__name__, parameters, mark.kwargs["world"])


def key_of(item: pytest.Item) -> Key | None:
    """Return the key of the job that a test shares with others, or None where a test is not for ranks."""
    mark = item.get_closest_marker("on_ranks")
    if mark is None or not isinstance(item, pytest.Function):
        return None
    return mark.kwargs["job"] or str(item.path.parent), item.callspec.params["ranks"]


def limit_of(item: pytest.Item) -> float:
    """Return the seconds that a test may take: less than pytest grants, so that ranks' output is in the report."""
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0] if mark is not None else item.config.getini("timeout")) - 5.0


class SharedJob:
    """A job whose ranks go through tests, each known by its id."""

    def __init__(self, ranks: Ranks, cases: dict[str, Case]) -> None:
        self.ids = list(cases)
        self.cases = list(cases.values())
        self.numbers = {nodeid: number for number, nodeid in enumerate(self.ids)}
        self.ranks = ranks
        self.over = ""  # why there will be no more outcomes
        self._starts = 0
        self._job: Job | None = None
        self._read = [0] * ranks.size  # bytes of each rank's file
        self._begun = 0  # the last test that a rank has begun
        self._outcomes: list[dict[int, tuple[str, str]]] = [{} for _ in range(ranks.size)]

    def outcomes(self, nodeid: str, limit: float) -> list[tuple[str, str]]:
        """Wait for a test's outcomes by rank, at most `limit` seconds; raise `RanksFailed` if the job ends before."""
        number = self.numbers[nodeid]
        try:
            if not self._has_told(number, limit) and self._begun < number:
                self._end(f"the job that this test shares has ended in {self.ids[self._begun]}")  # which has failed
                self._has_told(number, limit)
            if not self._told(number):
                raise NotWithin("the job has ended")
            if number == len(self.cases) - 1:
                self._finish()
        except NotWithin as error:
            assert self._job is not None
            told = failures([outcomes.get(number) for outcomes in self._outcomes])
            where = self.ids[self._begun]
            if not self._ended():
                self._job.dump()
            report = f"{told}{error}; the last test that a rank has begun is {where}\n{self._job.result()}"
            self._end(f"the job that this test shares has ended in {where}")
            raise RanksFailed(report) from None
        except BaseException:
            self._end(f"the job that this test shares was ended in {self.ids[self._begun]}")
            raise
        return [self._outcomes[rank][number] for rank in range(self.ranks.size)]

    def _has_told(self, number: int, limit: float) -> bool:
        """Start ranks if none run, and wait until a test is done or they have ended; return whether it is done."""
        if self.over:
            raise RanksFailed(self.over)
        if self._job is None:
            self._starts += 1
            self._begun, self._read = number, [0] * self.ranks.size
            env = {**STALLED, **dict(self.ranks.env)}
            self._job = start_ranks(
                self.ranks.size, on_ranks.run, self.cases, number, env=env, python=self.ranks.python
            )
        until(lambda: self._told(number) or self._ended(), f"{self.ids[number]} is done", limit)
        return self._told(number)

    def _told(self, number: int) -> bool:
        """Read new outcomes, and return whether all ranks have written that of a test."""
        assert self._job is not None
        for rank, outcomes in enumerate(self._outcomes):
            if number in outcomes:
                continue
            try:
                with open(self._job.directory / f"{OUTCOMES}.{rank}", "rb") as file:
                    file.seek(self._read[rank])
                    lines, end, _ = file.read().rpartition(b"\n")
            except FileNotFoundError:
                return False
            self._read[rank] += len(lines + end)
            for at, outcome, text in map(json.loads, lines.splitlines()):
                self._begun = max(self._begun, at)
                if outcome != BEGUN:
                    outcomes[at] = outcome, text
        return all(number in outcomes for outcomes in self._outcomes)

    def _ended(self) -> bool:
        assert self._job is not None
        return self._job.process.poll() is not None

    def _finish(self) -> None:
        """Require that the job ends well and leaves nothing, after its last test."""
        assert self._job is not None
        job, self._job = self._job, None
        self.over = "the job that this test shares is over"
        with job:
            job.allow(30.0)
            job.finish()

    def _end(self, why: str) -> None:
        """End the ranks; the next test starts others, unless that was done too often."""
        if self._starts == STARTS:
            self.over = self.over or f"{why}, the last of {STARTS} that were started"
        job, self._job = self._job, None
        if job is not None:
            with job:
                pass

    def close(self, why: str) -> None:
        """End the ranks, and start no more."""
        self.over = self.over or why
        self._end(why)


def failures(outcomes: list[tuple[str, str] | None]) -> str:
    """Return the failures of all ranks as one text."""
    texts = [
        f"rank {rank}: {outcome[1]}\n"
        for rank, outcome in enumerate(outcomes)
        if outcome is not None and outcome[0] == FAILED
    ]
    return "".join(texts)


class Jobs:
    """pytest plugin that holds all jobs of a run."""

    def __init__(self) -> None:
        self.jobs: dict[Key, SharedJob] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize a test on ranks by its numbers of ranks."""
        mark = metafunc.definition.get_closest_marker("on_ranks")
        if mark is None:
            return
        only = metafunc.config.getoption("only_ranks")
        names, rows = ["ranks"], [(each,) for each in mark.kwargs["ranks"] if not only or each.size in only]
        for name, values in (each.args for each in metafunc.definition.iter_markers("per_size")):
            names.append(name)
            rows = [(*row, value) for row in rows for value in values(row[0].size)]
        sets = [
            pytest.param(*row, id="-".join(map(str, row)), marks=[pytest.mark.slow] * (row[0].spare and not only))
            for row in rows
        ]
        metafunc.parametrize(names, sets, indirect=["ranks"])

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Order the tests so that those of one job are adjacent: no two jobs run at once."""
        first: dict[Any, int] = {}
        places = [first.setdefault(key_of(item) or item.nodeid, at) for at, item in enumerate(items)]
        items[:] = [item for _, item in sorted(zip(places, items, strict=True), key=lambda pair: pair[0])]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Give each job the tests that were chosen; its first test also gets the time in which ranks start."""
        chosen: dict[Key, dict[str, Case]] = {}
        parts: dict[Key, str] = {}
        for item in session.items:
            if (key := key_of(item)) is not None and not statically_skipped(item):
                if key not in chosen and item.get_closest_marker("timeout") is None:
                    item.add_marker(pytest.mark.timeout(START))
                chosen.setdefault(key, {})[item.nodeid] = case_of(item)
                part = find_part(item.nodeid)
                assert parts.setdefault(key, part) == part, f"{parts[key]} and {part} share ranks: see workers.py"
        self.jobs = {key: SharedJob(key[1], cases) for key, cases in chosen.items()}

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> object:
        """Report the outcome of a test on ranks, instead of calling the test here."""
        key = key_of(pyfuncitem)
        if key is None:
            return None
        ended = ""
        try:
            outcomes = self.jobs[key].outcomes(pyfuncitem.nodeid, limit_of(pyfuncitem))
        except RanksFailed as error:
            ended = str(error)
        if ended:
            pytest.fail(ended, pytrace=False)
        if wrong := failures(list(outcomes)):
            pytest.fail(wrong, pytrace=False)
        reasons = [text for outcome, text in outcomes if outcome == SKIPPED]
        if len(reasons) == len(outcomes):
            pytest.skip(reasons[0])
        return True

    def pytest_unconfigure(self) -> None:
        """End jobs that still run because the run was stopped."""
        for job in self.jobs.values():
            job.close("the run has ended")


def statically_skipped(item: pytest.Item) -> bool:
    """Return whether a mark skips a test before it is called."""
    return any(_skips(mark) for mark in item.iter_markers() if mark.name in ("skip", "skipif"))


def _skips(mark: pytest.Mark) -> bool:
    return mark.name == "skip" or bool(mark.args and mark.args[0])


@pytest.fixture(autouse=True)
def ranks(request: pytest.FixtureRequest) -> Ranks | None:
    """Ranks of a test that runs on ranks."""
    return getattr(request, "param", None)


@pytest.fixture
def rank() -> None:
    """Rank of the process; each rank provides its own value."""


@pytest.fixture
def size() -> None:
    """Number of ranks; provided on the rank."""


@pytest.fixture
def parts() -> None:
    """Parts of a test (`on_ranks.Parts`); provided on the rank."""
