"""The time for which a thread waits for a processor: what the kernel writes about it, also where it does not count."""

from __future__ import annotations

import ctypes
import os
import tempfile

import pytest

from .header_library import build_library

SHIM = """
#include "engine_ext/platform/task_times.h"
int delay_of(int fd, uint64_t *ns) { return task_times_delay(fd, ns); }
int open_own(void) { return task_times_open(); }
"""


@pytest.fixture(scope="module")
def times(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build_library(tmp_path_factory.mktemp("task_times"), SHIM)


def parse(times: ctypes.CDLL, text: str) -> int | None:
    """Return the delay that a file with this text tells; None if it is not known."""
    delay = ctypes.c_uint64(7)
    with tempfile.TemporaryFile() as file:
        file.write(text.encode())
        file.flush()
        return delay.value if times.delay_of(file.fileno(), ctypes.byref(delay)) else None


@pytest.mark.parametrize(
    ("text", "delay"),
    [
        ("123 456 7\n", 456),
        ("123 0 7\n", 0),
        ("0 456 7\n", 456),  # a thread that has just begun
        ("0 0 1\n", 0),
        (f"1 {2**64 - 1} 1\n", 2**64 - 1),
        ("123 456 0\n", None),  # a kernel that does not count
        ("0 0 0\n", None),
        ("123 456 7", 456),
        ("123 456\n", None),
        ("123 456 \n", None),
        ("123  456 7\n", None),
        ("-1 456 7\n", None),
        ("", None),
        ("unknown\n", None),
    ],
)
def test_delay_is_the_second_number_where_the_kernel_counts(times: ctypes.CDLL, text: str, delay: int | None) -> None:
    assert parse(times, text) == delay


def test_no_file_tells_nothing(times: ctypes.CDLL) -> None:
    assert not times.delay_of(-1, ctypes.byref(ctypes.c_uint64()))


def test_own_delay_is_read(times: ctypes.CDLL) -> None:
    fd, delay = times.open_own(), ctypes.c_uint64()
    if fd < 0:
        pytest.skip("this kernel has no schedstat")
    try:
        assert times.delay_of(fd, ctypes.byref(delay))
    finally:
        os.close(fd)
