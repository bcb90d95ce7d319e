"""Programs of ranks for tests of gradients that are kept side by side on GPUs, which are stand-ins.

python -m tests.gpu.views_programs NAME+NAME+... RANK SIZE KERNELS ...
"""

from __future__ import annotations

from . import mutants

mutants.take_native_place()  # the mutant, if this is a run of one

import gc  # noqa: E402
import random  # noqa: E402
from collections.abc import Collection, Sequence  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import pytest  # noqa: E402

from engine.errors import EngineError  # noqa: E402
from engine.native import gradients  # noqa: E402

from ..waiting import until  # noqa: E402
from .allreduce_programs import OPS, Binding, Parameter, compare, core, main, on_host, values  # noqa: E402
from .device_tensors import DeviceTensor, Framework  # noqa: E402
from .moving_programs import released  # noqa: E402
from .plane_programs import Rank, planes  # noqa: E402
from .submitted import seen  # noqa: E402
from .sums_programs import drawn, expect_bits  # noqa: E402

ALIGNMENT = 16
IDENTITY = {"sum": 0, "average": 0, "max": -np.inf}
ODD = [*range(100, 116)]  # numbers of elements, most of which leave a gap after them


class Typed(Parameter):
    """A parameter of any dtype."""

    def __init__(self, count: int, dtype: str) -> None:
        super().__init__(count)
        self.dtype = dtype
        self.memory = DeviceTensor(np.zeros(count, dtype))


class Keeping(Binding):
    """A framework that keeps gradients side by side, in the order of their first arrival."""

    def __init__(self, parameters: Sequence[Typed]) -> None:
        super().__init__(list(parameters))
        self.step = ALIGNMENT // np.dtype(parameters[0].dtype).itemsize
        total = sum(map(self.extent, parameters))
        self.buffer = DeviceTensor(np.zeros(total, parameters[0].dtype))
        self.taken = 0
        self.places: dict[int, int] = {}

    def extent(self, parameter: Parameter) -> int:
        return -(-parameter.count // self.step) * self.step

    def place_for(self, index: int) -> DeviceTensor:
        begin, parameter = self.taken, self.parameters[index]
        self.taken += self.extent(parameter)
        place = self.buffer.slice(begin, begin + parameter.count)
        self.places[index] = place.at.value
        return place

    def separate(self, parameter: Parameter, gradient: DeviceTensor) -> DeviceTensor:
        parameter.grad = DeviceTensor(gradient.numpy())
        return parameter.grad

    def replace(self, _index: int, _parameter: Parameter, gradient: Any) -> Any:
        return (*gradient, [1 << 20], None) if isinstance(gradient, tuple) else gradient


class Optimizer:
    """Gradients of parameters with these numbers of elements, which may be kept side by side."""

    made = 0

    def __init__(
        self, counts: Sequence[int], op: str = "sum", dtype: str = "float32", kept: bool = True, **how: Any
    ) -> None:
        Optimizer.made += 1
        number = Optimizer.made
        self.how = {"op": op, **how}
        self.parameters = [Typed(count, dtype) for count in counts]
        self.binding = Keeping(self.parameters) if kept else Binding(list(self.parameters))
        given = how.get("prescale", 1.0), how.get("postscale", 1.0), how.get("wire")
        self.group = gradients.GradientGroup(core(), self.binding, OPS[op], *given, number)
        self.hooks = [
            self.group.add(each, f"{number}.{k}", None, False, kept) for k, each in enumerate(self.parameters)
        ]

    def begin(self, mine: Sequence[np.ndarray], order: Sequence[int], without: Collection[int] = ()) -> None:
        """Start the backward pass's gradients, in place where there are some."""
        for k in order:
            parameter = self.parameters[k]
            if k in without:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = DeviceTensor(mine[k], late=0.2)
            else:
                parameter.grad.compute(mine[k], late=0.2)
            self.hooks[k](parameter)

    def finish(self) -> None:
        """End the backward pass."""
        for k, memory in self.group.finish():
            self.parameters[k].grad = memory

    def train(self, me: Rank, order: Sequence[int] | None = None, lacking: Any = lambda _rank: ()) -> None:
        """Run a whole pass, and check its results; `lacking` gives the gradients that a rank lacks."""
        mine = [values(me.rank + k, each.count, each.dtype) for k, each in enumerate(self.parameters)]
        self.begin(mine, order or range(len(mine))[::-1], lacking(me.rank))
        self.finish()
        nowhere = set.intersection(*(set(lacking(rank)) for rank in range(me.size)))
        for k, parameter in enumerate(self.parameters):
            if k in nowhere:
                assert parameter.grad is None, k
                continue
            given = np.full_like(mine[k], IDENTITY[self.how["op"]]) if k in lacking(me.rank) else mine[k]
            wanted = on_host(given, **self.how)
            assert parameter.grad is not None, k
            got, what = parameter.grad.numpy(), f"{k} of {parameter.dtype}, {self.how}"
            if self.how["op"] == "average" and self.how.get("wire") == "bfloat16":  # it is divided after the transfer
                np.testing.assert_allclose(got, wanted, rtol=1e-2, atol=1e-2, err_msg=what)
            else:
                compare(got, wanted, what, self.how["op"], self.how.get("wire"))
            if isinstance(self.binding, Keeping):
                assert parameter.grad.at.value == self.binding.places[k], f"{what} is not in its place"

    def forget(self) -> None:
        """Remove the gradients, like zero_grad(set_to_none=True)."""
        for parameter in self.parameters:
            parameter.grad = None


def kept(me: Rank) -> None:
    """Check values and places of gradients, new and existing ones, absent on some ranks or on all."""
    drawn = random.Random(me.rank)
    with me.world("kept", cycle_time_ms=1.0, fusion_threshold=2048):
        for dtype, how in (
            ("float32", {"op": "sum"}),
            ("float32", {"op": "average"}),
            ("float16", {"op": "average"}),
            ("float32", {"op": "sum", "prescale": 0.5, "postscale": 4.0}),
            ("float32", {"op": "average", "wire": "bfloat16"}),
            ("int32", {"op": "sum"}),
            ("float64", {"op": "max"}),
        ):
            optimizer = Optimizer(ODD, dtype=dtype, **how)
            for turn in range(5):
                if turn in (1, 3):
                    optimizer.forget()
                lacks = {rank: {3, 7 + rank, (5 * turn + rank) % len(ODD)} for rank in range(me.size)}
                lacking = lacks.__getitem__ if turn > 2 else lambda _rank: {3}
                optimizer.train(me, lacking=lacking)
            order = [*range(len(ODD))]
            drawn.shuffle(order)
            optimizer.train(me, order)  # a different order on each rank


def launches(me: Rank) -> None:
    """Check that gradients side by side are neither packed nor unpacked, and that nothing else changes."""

    def count(optimizer: Optimizer, new: bool) -> tuple[int, int]:
        """Return how often a pass launches kernels, and reduces."""
        if new:
            optimizer.forget()
        optimizer.train(me)
        return me.calls("cuLaunchKernel") - before[0], me.calls("ncclAllReduce") - before[1]

    with me.world("launches", cycle_time_ms=1.0, fusion_threshold=2048):
        reduced = set()
        for op, kept, new, each in (
            ("sum", False, True, 2),
            ("sum", False, False, 2),
            ("sum", True, True, 1),
            ("sum", True, False, 0),
            ("average", True, True, 2),
            ("average", True, False, 1),
        ):
            optimizer = Optimizer(ODD, op, kept=kept)
            optimizer.train(me)
            for _ in range(2):
                before = me.calls("cuLaunchKernel"), me.calls("ncclAllReduce")
                launched, batches = count(optimizer, new)
                assert 1 < batches < len(ODD) / 2, batches
                assert launched == each * batches, (op, kept, new, launched, batches)
                reduced.add(batches)
        assert len(reduced) == 1, reduced
        optimizer = Optimizer(ODD, wire="bfloat16")
        optimizer.train(me)
        before = me.calls("cuLaunchKernel"), me.calls("ncclAllReduce")
        launched, batches = count(optimizer, False)
        assert launched == 2 * batches, "what is compressed is packed"


def apart(me: Rank) -> None:
    """Let gradients arrive in another order on one rank: only it packs, with equal calls and pieces."""
    planes.SLAB, planes.TABLES = 1 << 16, 1 << 12
    counts = [9000, 7, 9001, 30000, 3, *range(50, 80), 9002]
    with me.world("apart", cycle_time_ms=1.0):
        optimizer, order = Optimizer(counts), [*range(len(counts))[::-1]]
        optimizer.train(me, order[::-1] if me.rank == 1 else order)
        for turn in range(4):
            if turn == 2:
                optimizer.forget()
            before = me.calls("cuLaunchKernel")
            optimizer.train(me, order)
            launched = me.calls("cuLaunchKernel") - before
            assert (launched == 0) == (me.rank != 1 and turn != 2), launched
        optimizer.train(me, order, lambda rank: {3, 5} if rank == 0 else {0})


def ordered(me: Rank) -> None:
    """Check that device_sums=ordered gives the bits of host memory, in their places."""
    me.cuda.stand_hosts_are_one(1)
    with me.world("ordered", cycle_time_ms=1.0, device_sums="ordered"):
        for op in ("sum", "average"):
            optimizer = Optimizer(ODD, op)
            for _ in range(3):
                optimizer.begin([drawn(me.rank, count, "float32") for count in ODD], range(len(ODD)))
                optimizer.finish()
                for k, parameter in enumerate(optimizer.parameters):
                    wanted = on_host(drawn(me.rank, ODD[k], "float32"), op=op)
                    expect_bits(parameter.grad.numpy(), wanted, f"{op} {k}")
                    assert parameter.grad.at.value == optimizer.binding.places[k]


def joins(me: Rank) -> None:
    """Join on a rank, which then has no places."""
    with me.world("joins", cycle_time_ms=1.0, fusion_threshold=2048):
        optimizer = Optimizer(ODD)
        for _ in range(2):
            optimizer.train(me)
        if me.rank == me.size - 1:
            core().join()
            return
        for turn in range(3):
            mine = [values(me.rank + k, count, "float32") for k, count in enumerate(ODD)]
            if turn == 1:
                optimizer.forget()
            optimizer.begin(mine, range(len(ODD))[::-1])
            optimizer.finish()
            for k, parameter in enumerate(optimizer.parameters):
                wanted = np.add.reduce([values(rank + k, ODD[k], "float32") for rank in range(me.size - 1)])
                compare(parameter.grad.numpy(), wanted, f"{turn}, {k}")
        core().join()


def sparse(me: Rank) -> None:
    """Reduce a sparse gradient, which leaves its place empty, and returns there when it is dense."""
    with me.world("sparse", cycle_time_ms=1.0):
        optimizer = Optimizer([100] * 4)
        for turn in range(4):
            if turn % 2 == 0:
                optimizer.train(me)
                continue
            parts = DeviceTensor(np.array([[me.rank]], np.int64)), DeviceTensor(np.full((1, 1), me.rank, np.float32))
            optimizer.parameters[0].grad = parts
            optimizer.hooks[0](optimizer.parameters[0])
            optimizer.begin([values(me.rank, 100, "float32")] * 4, [1, 2, 3])
            found = dict(optimizer.group.finish())
            assert [*found] == [0], found
            np.testing.assert_array_equal(seen(found[0][0][0], np.int64), range(me.size))
            np.testing.assert_array_equal(seen(found[0][1][0], np.float32), range(me.size))
            for parameter in optimizer.parameters[1:]:
                compare(parameter.grad.numpy(), on_host(values(me.rank, 100, "float32")), "beside a sparse one")
            optimizer.parameters[0].grad = None


def shared(me: Rank) -> None:
    """Give a parameter another one's gradient: both are named, and are separate from the next pass on."""
    with me.world("shared", cycle_time_ms=1.0):
        optimizer = Optimizer([100] * 4)
        optimizer.train(me)
        optimizer.train(me)
        one, other = optimizer.parameters[1:3]
        other.grad = one.grad
        for k, parameter in enumerate(optimizer.parameters):
            optimizer.hooks[k](parameter)
        number = Optimizer.made
        with pytest.raises(EngineError, match=f"the gradients of '{number}.1' and '{number}.2' share memory"):
            optimizer.finish()
        for _ in range(2):
            optimizer.train(me)
        optimizer.forget()
        optimizer.train(me)


def dropped(me: Rank) -> None:
    """Drop an optimizer while the device works on its gradients, whichever thread has waited for them (problem 10)."""
    me.cuda.stand_hosts_are_one(1)  # the CUDA thread reports the device's progress in memory
    with me.world("dropped", cycle_time_ms=1.0):
        ours, other = Framework.stream, Framework.device.new_stream()
        for turn in range(6):
            optimizer = Optimizer(ODD)
            if turn % 3:
                Framework.stream = other  # the places were made on the first stream
            optimizer.begin([values(me.rank, count, "float32") for count in ODD], range(len(ODD)))
            if turn % 3 != 1:
                optimizer.finish()
                if turn % 2:
                    optimizer.begin([values(me.rank, count, "float32") for count in ODD], range(len(ODD)))
            else:
                core().barrier(f"all have begun {turn}").wait()
            del optimizer
            gc.collect()
            Framework.stream = ours
        until(released, "what was given up is freed")


PROGRAMS = {program.__name__: program for program in (kept, launches, apart, ordered, joins, sparse, shared, dropped)}


if __name__ == "__main__":
    main(PROGRAMS)
