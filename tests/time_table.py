"""Time of a whole run by directory, and its long tests, which pytest shows at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import PurePosixPath

import pytest

WHOLE = 1000  # tests; for fewer, `--durations` says more
LONG = 10.0  # seconds; a longer test should be marked slow, if other tests cover a part of it


def time_table(reports: Iterable[object]) -> list[str]:
    """Return the table's lines from pytest's reports of tests, ignoring others; none if only some of the tests ran."""
    seconds: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for report in reports:
        if isinstance(report, pytest.TestReport):
            directory = str(PurePosixPath(report.nodeid.partition("::")[0]).parent)
            seconds[directory] += report.duration  # type: ignore[assignment]
            tests[directory] += report.when == "setup"  # each test has one
    if tests.total() < WHOLE:
        return []
    rows = [*seconds.most_common(), ("all", sum(seconds.values()))]
    tests["all"] = tests.total()
    width = max(map(len, seconds))
    return [
        f"{name:<{width}}  {tests[name]:>5} tests  {spent:>7.1f} s  {spent / (rows[-1][1] or 1.0):>4.0%}"
        for name, spent in rows
    ]


def long_tests(reports: Iterable[object]) -> list[str]:
    """Return the tests that took more than `LONG` seconds; a job's first test includes the start of its ranks."""
    seconds: Counter[str] = Counter()
    for report in reports:
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid] += report.duration  # type: ignore[assignment]
    return [f"{spent:>6.1f} s  {name}" for name, spent in seconds.most_common() if spent > LONG]
