"""Programs of ranks for tests of process sets on GPUs, which are stand-ins.

python -m tests.gpu.sets_programs NAME RANK SIZE KERNELS ...
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.errors import DeviceError, UnsupportedTensorError
from engine.host import patience
from engine.native import gradients
from engine.session import runtime

from ..waiting import let_pass, until
from . import moving_programs
from .allreduce_programs import (
    OPS,
    Binding,
    Parameter,
    allreduce,
    broadcast,
    compare,
    core,
    main,
    on_host,
    values,
    within,
)
from .device_tensors import DeviceTensor, Framework, Room
from .plane_programs import Rank, planes
from .submitted import drawn

Sets = list[engine.ProcessSet]
planes.SLAB = 1 << 20  # each communicator sends the slab around when it is connected


def of(me: Rank, *chosen: list[int]) -> Sets:
    """Form sets, and return those with this rank."""
    return [each for each in map(engine.add_process_set, chosen) if each.included()]


def open_all(me: Rank) -> None:
    """Open the GPUs of all ranks, also of those that are in no set."""
    tensor = DeviceTensor(values(me.rank, 10, "float32"))
    allreduce(tensor, tensor, "all").wait()


def total(ranks: Any, count: int) -> np.ndarray:
    """Return the sum over a set's ranks of their `values`."""
    return np.add.reduce([values(rank, count, "float32") for rank in ranks])


# ---- numbers ---------------------------------------------------------------------------------------------------------


def numbers(me: Rank) -> None:
    """Compare all operations with those in host memory in the same set, for sets of all, some and one rank."""
    with me.world("numbers"):
        for each in of(me, [0, 1], [1, 2], [2]):
            with within(each) as mine:
                reductions(mine)
                moving_programs.gathers(mine)
                moving_programs.exchanges(mine)
                for root in each.ranks:
                    tensor = DeviceTensor(values(me.rank, 9, "int32"), late=1.0)
                    broadcast(tensor, tensor, root).wait()
                    compare(tensor.numpy(), values(root, 9, "int32"), f"from {root}")
        reductions(me)


def reductions(mine: Any) -> None:
    """Sum by NCCL and in the order of ranks, alone and in a group."""
    for op in OPS:
        given = values(mine.rank, 1000, "float32")
        tensor = DeviceTensor(given, late=1.0)
        allreduce(tensor, tensor, op=op).wait()
        compare(tensor.numpy(), on_host(given, op=op), op, op)
    group = [DeviceTensor(values(mine.rank, 10 + k, dtype)) for k, dtype in enumerate(("float32", "int16", "float32"))]
    core().allreduce_group(group, group, None, OPS["sum"], 1.0, 1.0).wait()
    for k, each in enumerate(group):
        compare(each.numpy(), on_host(values(mine.rank, 10 + k, str(each.like.dtype))), f"group {k}")


def scatters(me: Rank) -> None:
    """Run reduce-scatters, which take longest."""
    with me.world("scatters"):
        open_all(me)
        for each in of(me, [0, 2]):
            with within(each) as mine:
                moving_programs.scatters(mine)


def hooks(me: Rank) -> None:
    """Reduce gradients of a set's optimizer in frozen batches, as in the world; a rank may join in a set."""
    with me.world("hooks"):
        open_all(me)
        for each in of(me, [0, 2]):
            with within(each) as mine:
                parameters = [Parameter(10 * k + 1) for k in range(12)]
                group = gradients.GradientGroup(core(), Binding(parameters), OPS["average"], number=1)
                native = [group.add(parameter, f"parameter {k}", None) for k, parameter in enumerate(parameters)]
                for step in range(4):
                    for k in reversed(range(12)):
                        parameters[k].grad = DeviceTensor(values(me.rank, parameters[k].count, "float32"), late=0.5)
                        native[k](parameters[k])
                    assert group.finish() == []
                    for k, parameter in enumerate(parameters):
                        wanted = total(each.ranks, parameter.count) / np.float32(mine.size)
                        compare(parameter.grad.numpy(), wanted, f"step {step}, {k}")
                        parameter.grad = None
                frozen = [row for row in core().history() if row["frozen"]]
                assert len(frozen) == 3, frozen
                assert {row["tensors"] for row in frozen} == {12}
                if mine.rank == 0:
                    tensor = DeviceTensor(values(me.rank, 100, "float32"), late=1.0)
                    allreduce(tensor, tensor, "alone").wait()
                    compare(tensor.numpy(), values(me.rank, 100, "float32"), "the other has joined")
                core().join()


# ---- one order -------------------------------------------------------------------------------------------------------


def crossing(me: Rank, turns: str) -> None:
    """Use sets with common ranks, and the world, with hosts that submit in any order, and late (problem 1)."""
    me.cuda.stand_hosts_are_one(1)  # the device's progress is reported by a word that the stand-in does not see
    draw = np.random.default_rng(me.rank)
    with me.world("crossing", cycle_time_ms=0.5):
        sets = [*of(me, [0, 1, 2], [0, 1, 3], [2, 3], [1, 2]), engine.global_process_set]
        for each in sets:
            with within(each):  # first uses in one order: each waits until its ranks are connected
                tensor = DeviceTensor(values(me.rank, 10, "float32"))
                allreduce(tensor, tensor, "first").wait()
        for turn in range(int(turns)):
            pending = []
            for k in draw.permutation(len(sets)):
                if draw.integers(2):
                    let_pass(float(draw.integers(4)) / 1000)
                tensor = DeviceTensor(values(me.rank, 100 + turn, "float32"), late=float(draw.integers(2)))
                with within(sets[k]):
                    pending.append((sets[k], tensor, allreduce(tensor, tensor, f"turn {turn}")))
            for each, tensor, handle in pending:
                handle.wait()
                ranks = each.ranks if each is not engine.global_process_set else range(me.size)
                compare(tensor.numpy(), total(ranks, 100 + turn), f"{each}, turn {turn}")


def ahead(me: Rank) -> None:
    """Check that neither the ranks' first exchange nor late memory makes anyone wait for ever."""
    me.cuda.stand_hosts_are_one(1)
    with me.world("ahead"):
        sets = of(me, [0, 1], [1, 2])
        for each in sets:
            with within(each):
                tensor = DeviceTensor(values(me.rank, 10, "float32"))
                allreduce(tensor, tensor, "first").wait()
        for turn in range(8):
            for each in sets:
                with within(each) as mine:
                    handles = [
                        core().alltoall(
                            DeviceTensor(drawn(me.rank, 4, "float32")), [2] * mine.size, None, False, Room()
                        )
                        for _ in range(3)
                    ]
                    late = DeviceTensor(values(me.rank, 50, "float32"), late=3.0)
                    handles.append(allreduce(late, late, f"turn {turn}"))
                    for handle in handles:
                        handle.wait()
                    compare(late.numpy(), total(each.ranks, 50), f"turn {turn}")


def threads(me: Rank) -> None:
    """Connect sets on threads of their own, without any order among them."""
    me.cuda.stand_hosts_are_one(1)
    with me.world("threads"):
        open_all(me)
        sets = of(me, [0, 1, 2], [0, 1, 3])
        failures: list[BaseException] = []

        def use(each: engine.ProcessSet) -> None:
            try:
                me.context()
                for turn in range(20):
                    tensor = DeviceTensor(values(me.rank, 10, "float32"))
                    native = each.engine
                    native.allreduce(tensor, tensor, f"turn {turn}", OPS["sum"], 1.0, 1.0, False, None).wait()
                    compare(tensor.numpy(), total(each.ranks, 10), f"{each}, turn {turn}")
            except BaseException as error:
                failures.append(error)

        running = [threading.Thread(target=use, args=(each,)) for each in (sets if me.rank else reversed(sets))]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        assert not failures, failures


def late(me: Rank) -> None:
    """Let each of three sets wait for a rank that is late within the limit; waiting for a turn may take longer."""
    me.cuda.stand_hosts_are_one(1)  # at a set's entry the CUDA thread sees that the device has passed the previous one
    patience.STEP = 60.0  # a wait counts in full, although the remaining limit is not checked meanwhile
    connect = planes._Joining._connect
    asked: list[int] = []

    def connects(self: Any, id: bytes) -> Any:
        if me.rank == 0:  # rank 0 asks for the turns, in the order of the sets
            until(lambda: len(asked) == self.number - 1, "the set before")
            let_pass(0.1)
            asked.append(self.number)
        else:  # the other rank of each set
            before = Path(f"connected {me.rank - 1}")
            until(lambda: me.rank == 1 or before.exists() or runtime.current_engine().failure, "the set before")
            let_pass(1.2)
        return connect(self, id)

    planes._Joining._connect = connects  # type: ignore[method-assign]
    with me.world("late", start_timeout=20.0):
        open_all(me)
        sets = of(me, [0, 1], [0, 2], [0, 3])
        runtime.current_device()._settings = dataclasses.replace(runtime.current_settings(), start_timeout=2.0)
        failures: list[BaseException] = []

        def use(number: int, each: engine.ProcessSet) -> None:
            try:
                me.context()
                tensor = DeviceTensor(values(me.rank, 10, "float32"))
                each.engine.allreduce(tensor, tensor, "first", OPS["sum"], 1.0, 1.0, False, None).wait()
                Path(f"connected {number}").touch()
                compare(tensor.numpy(), total(each.ranks, 10), f"{each}")
            except BaseException as error:
                failures.append(error)

        running = [threading.Thread(target=use, args=(each.ranks[1], each)) for each in sets]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        assert not failures, failures


class Device(ctypes.Structure):
    """The first fields of `device`."""

    _fields_ = (
        ("ordinal", ctypes.c_int),
        ("call", ctypes.c_void_p),
        *((name, ctypes.c_uint64) for name in ("pushed", "ended", "enqueued", "passed")),
    )


def seen(me: Rank) -> None:
    """Check that no stream waits for what the CUDA thread has seen the device pass: its word orders what follows.

    This is common when threads use other sets: the CUDA thread checks each entry when it gets to the next one.
    """
    with me.world("seen"):
        open_all(me)
        device = Device.from_address(runtime.current_device()._plane.cuda_thread.device)
        for each in of(me, [0, 1]):
            with within(each):
                tensor = DeviceTensor(values(me.rank, 10, "float32"), late=1.0)
                handle = allreduce(tensor, tensor, "first")
                until(lambda: device.passed == 2, "the CUDA thread has seen it, and what opened the GPUs")
                waits = me.calls("cuStreamWaitEvent")
                handle.wait()
                assert me.calls("cuStreamWaitEvent") == waits
                compare(tensor.numpy(), total(each.ranks, 10), "seen")


# ---- the end ---------------------------------------------------------------------------------------------------------


def removed(me: Rank) -> None:
    """Remove a set, and add others with the same and other ranks, while the world goes on."""
    me.cuda.stand_hosts_are_one(1)
    with me.world("removed"):
        for turn in range(4):
            ranks = [[0, 1], [0, 1], [1, 2], [0, 1, 2]][turn]
            chosen = engine.add_process_set(ranks) if len(ranks) < me.size else engine.global_process_set
            tensor = DeviceTensor(values(me.rank, 100, "float32"), late=1.0)
            handle = allreduce(tensor, tensor, f"world {turn}")
            if chosen.included():
                with within(chosen):
                    mine = DeviceTensor(values(me.rank, 50, "float32"), late=1.0)
                    allreduce(mine, mine, "of the set").wait()
                    gathered = core().allgather(mine, "rows", False, Room())
                    gathered.wait()
                compare(mine.numpy(), total(ranks, 50), f"turn {turn}")
            if chosen is not engine.global_process_set:
                assert engine.remove_process_set(chosen)
                assert runtime.current_device()._plane.cuda_thread.sets == 0, "it is still there"
            handle.wait()
            compare(tensor.numpy(), total(range(me.size), 100), f"world {turn}")
    assert me.calls("ncclCommInitRankConfig") == me.calls("ncclCommAbort")
    assert me.calls("ncclCommRevoke") == 0


def lost(me: Rank, how: str) -> None:
    """Lose a rank of a set in the middle of operations; ranks outside of the set are told, too."""
    last = me.rank == me.size - 1
    with me.losing_world("lost", stall_limit=2.0):
        sets = of(me, [1, 2], [0, 1])
        for each in sets:
            with within(each):
                tensor = DeviceTensor(values(me.rank, 100, "float32"))
                allreduce(tensor, tensor, "first").wait()
        if last:
            with within(sets[0]):
                tensor.compute(values(me.rank, 100, "float32"), late=5000.0)
                allreduce(tensor, tensor, "second")
            let_pass(0.5)  # until the other rank's GPU gets to it, and waits
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        if me.rank:
            with within(sets[0]):
                for name in ("second", "third"):
                    allreduce(tensor, tensor, name).wait()
        core().barrier("all").wait()
    with me.world("again", size=me.size - 1):
        open_all(me)
        for each in of(me, [1]):
            with within(each):
                allreduce(tensor, tensor, "first").wait()


def fails(me: Rank, call: str) -> None:
    """Make a call of rank 1's CUDA thread fail while a set's ranks are being connected, or later."""
    with me.refused_world("fails", start_timeout=3.0):
        tensor = DeviceTensor(values(me.rank, 100, "float32"))
        allreduce(tensor, tensor, "first").wait()
        sets = of(me, [0, 1])
        if me.rank == 1:
            me.fail(call, 1, 2)
        for each in sets:
            with within(each):
                allreduce(tensor, tensor, "second").wait()
        core().barrier("all").wait()


def stays(me: Rank) -> None:
    """Finish on rank 0, which gives turns, before a set without it: it stays until it is no longer needed."""
    me.cuda.stand_hosts_are_one(1)
    with me.world("stays", shutdown_timeout=30.0):
        open_all(me)
        for each in of(me, [1, 2]):
            with within(each):
                for turn in range(5):
                    tensor = DeviceTensor(values(me.rank, 100, "float32"), late=1.0)
                    allreduce(tensor, tensor, f"turn {turn}").wait()
                    compare(tensor.numpy(), total([1, 2], 100), f"turn {turn}")
                    let_pass(0.1)
        assert not any(one["left"] for one in runtime.current_engine().ranks() if me.rank and one["rank"] == 0)


def leaves(me: Rank) -> None:
    """Keep rank 0, which gives turns, for a limited time: then that is reported, and no rank waits for ever."""
    with me.refused_world("leaves", shutdown_timeout=2.0 if me.rank else 0.3):
        sets = of(me, [1, 2])
        tensor = DeviceTensor(values(me.rank, 100, "float32"))
        allreduce(tensor, tensor, "first").wait()
        for each in sets:
            with within(each):
                until(lambda: any(one["left"] for one in runtime.current_engine().ranks()), "rank 0 has left")
                allreduce(tensor, tensor, "second").wait()


def stuck(me: Rank) -> None:
    """Stop the world's coordinator, so that it gives no turn: it is named."""
    with me.refused_world("stuck", stall_limit=2.0):
        sets = of(me, [1, 2])
        tensor = DeviceTensor(values(me.rank, 100, "float32"))
        allreduce(tensor, tensor, "first").wait()
        for each in sets:
            with within(each):
                allreduce(tensor, tensor, "second").wait()
        core().barrier("ready").wait()
        if me.rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        let_pass(1.0)  # otherwise it might still give a turn
        for each in sets:
            with within(each):
                allreduce(tensor, tensor, "third").wait()


def elsewhere(me: Rank) -> None:
    """Submit a set's tensor on another GPU than the world's: the set's ranks are told, and the world goes on."""
    with me.world("elsewhere"):
        tensor = DeviceTensor(values(me.rank, 4, "float32"))
        allreduce(tensor, tensor, "first").wait()
        for each in of(me, [0, 1]):
            with within(each):
                Framework.ordinal = me.rank
                kind = UnsupportedTensorError if me.rank else DeviceError
                with pytest.raises(kind, match=r"cuda:1, but .* works on cuda:0"):
                    allreduce(tensor, tensor, "second").wait()
                Framework.ordinal = 0
                allreduce(tensor, tensor, "third").wait()


def old(me: Rank) -> None:
    """Use an NCCL too old for several communicators: all ranks of the set are told, and the world goes on."""
    with me.world("old"):
        tensor = DeviceTensor(values(me.rank, 4, "float32"))
        for each in of(me, [0]):
            with within(each), pytest.raises(DeviceError, match=r"NCCL 2\.22\.3 cannot .* install 2\.24\.0 or newer"):
                allreduce(tensor, tensor, "first").wait()
        allreduce(tensor, tensor, "second").wait()
        compare(tensor.numpy(), total(range(me.size), 4), "in the world")


PROGRAMS = {
    program.__name__: program
    for program in (
        *(numbers, scatters, hooks, crossing, ahead, threads, late, seen),
        *(removed, lost, fails, stays, leaves, stuck, elsewhere, old),
    )
}


if __name__ == "__main__":
    main(PROGRAMS, ("fails",))
