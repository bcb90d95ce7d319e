"""Small operations between hosts: callers that spin read their connections themselves.

Ranks are threads of one process, on pretended hosts (docs/architecture/protocol-hosts-small.md).
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import engine
from engine.errors import MismatchError

from ..waiting import until
from .thread_world import ThreadWorld

layouts = pytest.mark.parametrize(
    "hosts", [(0, 1), (0, 0, 1, 1), (0, 1, 2), (0, 1, 1)], ids=lambda hosts: "".join(map(str, hosts))
)


def reduce_all(rank: int, name: str, turn: int, elements: int = 500, blocking: bool = True) -> Any:
    """Allreduce of values that no other turn has."""
    native = engine.session.runtime.current_engine()
    tensor = np.full(elements, float(rank + 7 * turn), np.float32)
    handle = native.allreduce(tensor, tensor, name, engine.Sum, 1.0, 1.0, blocking)
    return handle, tensor, float(sum(range(native.size)) + native.size * 7 * turn)


def expect(handle: Any, tensor: Any, wanted: float) -> None:
    handle.wait()
    assert (tensor == wanted).all(), (tensor[0], wanted)


@pytest.mark.parametrize("spin_us", [0.0, 25.0, 1000.0])
@layouts
def test_every_caller_gets_the_sum_of_its_own_turn(hosts: tuple[int, ...], spin_us: float) -> None:
    """Blocking and asynchronous calls in turns, small and large, under one name and several."""

    def program(rank: int) -> None:
        for turn in range(60):
            elements = 30_000 if turn % 11 == 5 else 500
            late = reduce_all(rank, f"late.{turn % 3}", turn, blocking=False) if turn % 4 == 2 else None
            expect(*reduce_all(rank, f"x.{elements}", turn, elements, blocking=rank != turn % 3))
            if late:
                expect(*late)

    with ThreadWorld(len(hosts), hosts, spin_us=spin_us) as world:
        world.run(program)


@layouts
def test_a_call_after_a_failed_one_has_its_own_data(hosts: tuple[int, ...]) -> None:
    """Rank 1 submits another shape at times: all fail, and the next call has other data."""

    def program(rank: int) -> None:
        for turn in range(40):
            odd = rank == 1 and turn % 4 == 3
            try:
                expect(*reduce_all(rank, "x", turn, 400 if odd else 500))
            except MismatchError:
                assert turn % 4 == 3
            else:
                assert turn % 4 != 3

    with ThreadWorld(len(hosts), hosts, spin_us=25.0) as world:
        world.run(program)


@layouts
def test_the_network_thread_reads_again_when_no_caller_does(hosts: tuple[int, ...]) -> None:
    """After each blocking call nobody waits, so that operations only end if other threads take in what comes."""

    def program(rank: int) -> None:
        for turn in range(30):
            expect(*reduce_all(rank, "blocking", turn))
            handle, tensor, wanted = reduce_all(rank, "not awaited", turn, blocking=False)
            until(lambda: handle.done, "it is done without a caller", 10.0, pause=1e-4)  # noqa: B023
            assert (tensor == wanted).all()

    with ThreadWorld(len(hosts), hosts, spin_us=25.0, cycle_time_ms=0.1) as world:
        world.run(program)


@pytest.mark.parametrize("hosts", [(0, 1), (0, 1, 1)], ids=lambda hosts: "".join(map(str, hosts)))
def test_threads_of_a_rank_take_turns_in_reading(hosts: tuple[int, ...]) -> None:
    def program(rank: int) -> None:
        wrong: list[BaseException] = []

        def work(number: int) -> None:
            try:
                with world.as_rank(rank):
                    for turn in range(40):
                        expect(*reduce_all(rank, f"thread.{number}", turn, blocking=turn % 3 != 0))
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong, wrong

    with ThreadWorld(len(hosts), hosts, spin_us=25.0) as world:
        world.run(program)
