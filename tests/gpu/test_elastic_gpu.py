"""GPUs, which are stand-ins, in consecutive worlds of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..elastic.worlds import Nursery, Worker, Worlds
from .jobs import chosen

pytest.importorskip("torch")

PROGRAMS = "tests.gpu.elastic_programs"
CALLS = ("ncclAllReduce", "cuLaunchKernel", "ncclCommInitRankConfig", "ncclCommGetAsyncError", "cuEventRecord")

OWN = {"cuDevicePrimaryCtxRetain": 1, "cuStreamCreateWithPriority": 1}  # resources of the program
KEPT = ("cuDevicePrimaryCtxRetain", "cuEventCreate", "cuModuleLoadDataEx")  # kept while graphs may live


@pytest.fixture(scope="module")
def nursery(libraries: Path, registered: Path) -> Iterator[Nursery]:
    stand = {"STAND_DEVICES": "8", "STAND_QUIET": "1", "STAND_ONE_THREAD": "1"}
    given = {"LD_LIBRARY_PATH": str(libraries), "KERNELS": str(registered), **stand, **chosen(libraries)}
    with Nursery(PROGRAMS, **given) as begun:
        yield begun


def start(worlds: Worlds, slot: int, killed_in: str = "") -> Worker:
    """Start a worker that has the GPU of its slot."""
    return worlds.start(CUDA_VISIBLE_DEVICES=str(slot), KILLED_IN=killed_in)[0]


def survive(nursery: Nursery, program: str, calls: tuple[str, ...], size: int = 3, captured: bool = False) -> None:
    """Kill a newcomer within a call, world after world, and check the others' state.

    `captured` says whether graphs of a failed world may live, for which resources stay.
    """
    with Worlds(nursery, f"{PROGRAMS}:{program}", ENGINE_SHUTDOWN_TIMEOUT="2") as worlds:
        members = [start(worlds, slot) for slot in range(size - 1)]
        freed = []
        for turn, call in enumerate(calls):
            place = turn % size
            victim = start(worlds, size - 1, call)
            world = [*members[:place], victim, *members[place:]]
            worlds.place(world)
            for worker in world:
                told = worker.heard("left")
                assert told["kept"], f"the memory of worker {worker.number} has changed, after {calls[:turn]}"
                # If graphs may live, a thread waits for their launches beside the reset.
                assert told["waits"] <= captured, f"worker {worker.number} has waited for its device in the reset"
                worlds_before = 0 if worker is victim else turn
                left = OWN | {made: OWN.get(made, 0) + captured * worlds_before for made in KEPT}
                assert told["left"] == {made: left.get(made, 0) for made in told["left"]}, calls[:turn]
                if worker is members[0]:
                    freed.append(told["freed"])
            if call != "ncclCommInitRankConfig":
                for worker in world:
                    assert worker.heard("trained")["frozen"]
            armed = victim.heard("armed")["time"]
            for worker in members:
                failed = worker.heard("failed")
                assert failed["culprit"] == place, (call, failed)
                assert failed["time"] < armed + 5, f"a death in {call} was noticed late"
        assert freed == [turn * freed[1] for turn in range(len(freed))], "memory of the device was not freed"
        worlds.place(members)
        for worker in members:
            worker.heard("trained")


@pytest.mark.slow
def test_survivors_keep_context_and_memory_and_open_new_communicators(nursery: Nursery) -> None:
    """Survivors wait for the device only in calls that can be given up, and free all that the engine made there."""
    survive(nursery, "training", CALLS)


@pytest.mark.slow
def test_a_frozen_optimizer_is_frozen_anew(nursery: Nursery) -> None:
    survive(nursery, "frozen", ("cuGraphLaunch", "cuGraphLaunch"), 2, captured=True)
