"""Numbers are formatted in one way everywhere."""

from __future__ import annotations

import pytest

from engine.text import readable


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0, 1"),
        ([5, 0, 2, 1], "ranks 0-2, 5"),
        (range(4), "ranks 0-3"),
        (range(0, 20, 2), "ranks 0, 2, 4, .., 18"),
    ],
)
def test_ranks(numbers: range | list[int], text: str) -> None:
    assert readable.format_ranks(numbers, 4 if len(numbers) > 8 else None) == text


def test_cpus_are_written_as_taskset_reads_them() -> None:
    assert readable.format_cpus([8, 0, 1, 3, 2]) == "0-3,8"
    assert readable.format_cpus([0, 1]) == "0-1"
    assert readable.format_cpus([]) == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ns"),
        (3.21e-8, "32.1 ns"),
        (1.234e-6, "1.23 us"),
        (9.996e-4, "1000 us"),
        (0.0812, "81.2 ms"),
        (-0.5, "-500 ms"),
        (1.0, "1 s"),
        (1234.6, "1235 s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert readable.format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"), [(4, "4 B"), (4096, "4 KiB"), (100 << 20, "100 MiB"), (3 << 29, "1.5 GiB")]
)
def test_sizes(nbytes: int, text: str) -> None:
    assert readable.format_size(nbytes) == text
