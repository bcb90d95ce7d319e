"""A system without memory for some socket calls: no connection ends because of that, and none hangs."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.host import sockets
from engine.host.sockets import LONGEST_SHORTAGE, SHORT, retry_short, send_all

from ..ranks import run_ranks
from ..standins import HERE, LIBRARY, compiled
from . import shortage_program
from .shortage_program import LARGE, STEPS


@pytest.fixture(scope="module")
def shortage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Library that makes calls fail, to be preloaded."""
    return compiled(tmp_path_factory.mktemp("shortage") / "shortage.so", [HERE / "shortage.c"], *LIBRARY, "-ldl")


@pytest.mark.parametrize(("every", "run"), [(7, 1), (50, 20)])
def test_connections_outlive_calls_without_memory(shortage: Path, every: int, run: int) -> None:
    """`run` of `every` calls get no memory on every rank, from the rendezvous to the shutdown."""
    env = {"LD_PRELOAD": str(shortage), "SHORTAGE_EVERY": str(every), "SHORTAGE_RUN": str(run)}
    finished = run_ranks(3, shortage_program.sum_on_hosts, 2, env=env)
    sums: list[float] = []
    for step in range(STEPS):
        sums += [3 + 3 * step] + ([6] if step % 10 == 0 else [])
    assert finished.values == [[*sums, 2], sums, [*sums, 2]]
    assert finished.seconds < 60


def test_connections_without_memory_for_long_fail_and_say_so(shortage: Path) -> None:
    """The start has a time limit of its own, and no call hangs for ever."""
    env = {"LD_PRELOAD": str(shortage), "SHORTAGE_EVERY": "1000000", "SHORTAGE_RUN": "999999"}
    finished = run_ranks(2, shortage_program.sum_on_hosts, 2, env=env, check=False, options=["--start-timeout", "10"])
    assert finished.code != 0 and finished.seconds < 60
    assert "RendezvousError" in finished.err, finished


class Refusing:
    """A call that fails a given number of times, and then returns."""

    def __init__(self, number: int, times: float) -> None:
        self.number, self.times, self.calls = number, times, 0

    def __call__(self) -> int:
        self.calls += 1
        if self.calls <= self.times:
            raise OSError(self.number, "refused")
        return 7


@pytest.mark.parametrize("number", SHORT)
def test_a_call_without_memory_is_tried_again(number: int) -> None:
    call = Refusing(number, 3)
    assert retry_short(call) == 7 and call.calls == 4


def test_a_call_without_memory_for_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "LONGEST_SHORTAGE", 0.2)
    begun = time.monotonic()
    with pytest.raises(OSError, match="refused"):
        retry_short(Refusing(errno.ENOBUFS, float("inf")))
    assert 0.2 <= time.monotonic() - begun < LONGEST_SHORTAGE


def test_other_errors_are_errors_at_once() -> None:
    call = Refusing(errno.ECONNRESET, 1)
    with pytest.raises(ConnectionResetError):
        retry_short(call)
    assert call.calls == 1


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with left, right:
        yield left, right


@pytest.mark.parametrize("blocks", [True, False])
def test_sending_gives_up_on_a_reader_that_takes_nothing(
    pair: tuple[socket.socket, socket.socket], blocks: bool
) -> None:
    pair[0].setblocking(blocks)
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        send_all(pair[0], bytes(LARGE), 0.3)
    assert time.monotonic() - begun < 10
