"""The table of times at the end of a full run of the tests."""

from __future__ import annotations

import pytest

from ..time_table import WHOLE, long_tests, time_table


def reports(directory: str, tests: int, seconds: float) -> list[object]:
    """Reports as pytest gives them for tests whose setup, call and teardown take `seconds` each."""
    return [
        pytest.TestReport(
            f"{directory}/test_a.py::test[{number}-a/b]", ("", 0, ""), {}, "passed", None, when, (), seconds
        )
        for number in range(tests)
        for when in ("setup", "call", "teardown")
    ]


def test_the_directory_that_takes_longest_comes_first() -> None:
    few, many = reports("tests/b", 10, 10.0), reports("tests/longer", WHOLE - 10, 0.1)
    assert time_table([*many, *few, pytest.CollectReport("tests/b", "passed", None, [])]) == [
        "tests/b          10 tests    300.0 s   50%",
        "tests/longer    990 tests    297.0 s   50%",
        "all            1000 tests    597.0 s  100%",
    ]


def test_a_part_of_the_tests_has_no_table() -> None:
    assert time_table(reports("tests/a", WHOLE - 1, 1.0)) == []


def test_long_tests_are_listed_with_all_their_parts() -> None:
    found = [*reports("tests/a", 1, 3.4), *reports("tests/b", 1, 5.0), *reports("tests/c", 1, 3.3)]
    assert long_tests([*found, pytest.CollectReport("tests/b", "passed", None, [])]) == [
        "  15.0 s  tests/b/test_a.py::test[0-a/b]",
        "  10.2 s  tests/a/test_a.py::test[0-a/b]",
    ]
