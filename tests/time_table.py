"""Where the time of a whole run went, by directory, and in which long tests: what pytest shows at the end of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import PurePosixPath

import pytest

WHOLE = 1000  # tests: of fewer, `--durations` says more
LONG = 10.0  # seconds: what takes more should be marked slow, if others see a part of it


def time_table(reports: Iterable[object]) -> list[str]:
    """The lines of the table; none for a part of the tests.

    Parameters
    ----------
    reports : iterable
        Of pytest, of all tests; what is no report of a test is passed over.
    """
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
    """The tests that took more than `LONG` seconds; a first test on ranks also waits for them to begin."""
    seconds: Counter[str] = Counter()
    for report in reports:
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid] += report.duration  # type: ignore[assignment]
    return [f"{spent:>6.1f} s  {name}" for name, spent in seconds.most_common() if spent > LONG]
