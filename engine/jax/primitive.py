"""Collectives as primitives of JAX, with their rules for `jit`, `grad`, `vmap` and other transformations.

Each kind of collective is one primitive of any number of arrays, which are sent together. With arrays, a primitive
calls the engine at once. Compiled for the CPU, it calls `engine_ext/bindings/xla_call.c`, which returns a future. So
collectives of a program run concurrently, in any order, as far as their data allow. But XLA runs programs with few
operations or small arrays sequentially, and waits for each operation.

For JAX a collective is a pure function: calls with unused results are removed, like `lax.psum`. Every rank has to trace
the same collectives.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from .. import __version__
from ..collectives import collectives, groups
from ..collectives.compression import MARKERS
from ..collectives.process_sets import ProcessSet, global_process_set
from ..collectives.reduce_ops import Op, Sum
from ..errors import ArgumentError, EngineError, UnsupportedOperationError
from ..frameworks.backward import backward_name, choose_backward_op, expect_gradient, scatter_factor
from ..metrics.names import OPERATIONS
from ..native import calls, find_library
from ..session import topology

Shape = tuple[int, ...]
Rows = tuple[int, ...]  # number of rows from each rank

# Name of the handler in programs. It has the version, since saved programs contain numbers that depend on it.
TARGET = f"engine_collective_{__version__}"
WIRES = {None: 0, "float16": 1, "bfloat16": 2, "float8": 3, "tuned8": 254, "tuned": 255}
GROUP, MARKS_STEP = 1, 4  # ENGINE_CALL_* of engine_ext/bindings/calls.h
LINGER_NS = 30_000  # time for which the program's thread drives a grouped call itself, so that none has to wake it
TANGENT, AGAIN = ".tangent", ".again"
_SPLITS = (
    "alltoall with splits is not for compiled programs, whose shapes are fixed while the rows that come are not known: "
    "call it outside of jit, or leave splits out"
)


@dataclass(frozen=True)
class CallSettings:
    """Arguments of a collective, except for its arrays and its name."""

    process_set: ProcessSet = global_process_set
    op: Op = Sum
    prescale: float = 1.0
    postscale: float = 1.0
    wire: str | None = None  # dtype in which float32 and float64 are sent: a key of `WIRES`
    root: int = 0  # world rank of the root of a broadcast
    grouped: bool = False  # whether the arrays form one grouped operation, even if there is only one
    mathematical: bool = False  # whether the gradients are mathematical (`engine.frameworks.backward`)
    optimizer: int | None = None  # number of the optimizer whose step this call completes; None: none
    splits: Rows | None = None  # number of rows for each rank in an all-to-all; None: equal shares
    # Rows from each rank, for each array of an allgather or all-to-all; None: unknown
    rows: tuple[Rows, ...] | None = None


def divide_rows(rows: int, size: int) -> Rows:
    """Return the number of rows that each rank receives from a reduce-scatter."""
    return tuple(rows // size + (rank < rows % size) for rank in range(size))


class Collective:
    """Base class of the kinds of collectives, each of which is a primitive.

    Shapes in arguments of its methods are those of arrays on this rank.
    """

    kind: str
    by_rows = False  # whether the first dimension is divided among ranks, or concatenated from them
    in_place = False  # whether a result reuses the memory of its array; XLA copies an array that has other users
    gathers = False  # whether the numbers of rows from each rank, int32[arrays, ranks], are an additional result

    def __init__(self) -> None:
        self.primitive = Primitive(f"engine_{self.kind}")
        self.primitive.multiple_results = True
        self.primitive.def_impl(self._run_primitive)
        self.primitive.def_abstract_eval(self._abstract_eval)
        ad.primitive_jvps[self.primitive] = self._jvp_rule
        ad.primitive_transposes[self.primitive] = self._transpose_rule
        batching.primitive_batchers[self.primitive] = self._batching_rule
        pe.partial_eval_jaxpr_custom_rules[self.primitive] = self._partial_eval
        mlir.register_lowering(self.primitive, self._lower_cpu, platform="cpu")
        mlir.register_lowering(self.primitive, self._lower_elsewhere)

    def __call__(self, arrays: Sequence[Any], name: str | None, settings: CallSettings) -> list[Any]:
        """Return the results for arrays or tracers."""
        return self.bind_arrays(arrays, name, settings)[: len(arrays)]

    def bind_arrays(self, arrays: Sequence[Any], name: str | None, settings: CallSettings) -> list[Any]:
        """Return the results for arrays or tracers, and with `gathers` the numbers of rows from each rank."""
        if name is None and any(is_compiled(array) for array in arrays):
            raise ArgumentError(
                f"{self.kind} needs a name inside jit, scan, while_loop or cond, since compiled programs may call it in"
                ' any order: give name="...", equal on all ranks, and a name of its own to each call of a program'
            )
        return list(self.primitive.bind(*arrays, name=name, settings=settings))

    # Methods that kinds define.

    def run(self, arrays: list[Any], name: str | None, settings: CallSettings) -> list[Any]:
        """Run the collective on arrays, and return its results."""
        raise NotImplementedError

    def infer_shape(self, shape: Shape, index: int, settings: CallSettings) -> Shape:
        """Return the shape of the result for array number `index`."""
        return (sum(self.infer_rows(shape, index, settings)), *shape[1:]) if self.gathers else shape

    def infer_rows(self, shape: Shape, index: int, settings: CallSettings) -> Rows:
        """Return the number of rows from each rank for array number `index`."""
        raise NotImplementedError

    def backward(
        self, gradients: list[Any], shapes: list[Shape], name: str | None, settings: CallSettings
    ) -> list[Any]:
        """Compute the gradients of the inputs from those of the results."""
        raise NotImplementedError

    # Methods that all kinds have in common.

    def _run_primitive(self, *arrays: Any, name: str | None, settings: CallSettings) -> list[Any]:
        return self.run(list(arrays), name, settings)

    def _abstract_eval(self, *avals: Any, name: str | None, settings: CallSettings) -> list[Any]:
        expect_one_device()
        made = [
            jax.core.ShapedArray(self.infer_shape(aval.shape, index, settings), aval.dtype)
            for index, aval in enumerate(avals)
        ]
        if self.gathers:
            made.append(jax.core.ShapedArray((len(avals), settings.process_set.size()), np.dtype(np.int32)))
        return made

    def _jvp_rule(
        self, primals: Any, tangents: Any, *, name: str | None, settings: CallSettings
    ) -> tuple[list[Any], list[Any]]:
        expect_gradient(settings.op, self.kind)
        results = self.primitive.bind(*primals, name=name, settings=settings)
        moving = [k for k, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
        known = replace(settings, optimizer=None)
        if self.gathers:
            known = replace(known, rows=_known_rows(results[-1], moving))
        found = self.primitive.bind(
            *[tangents[k] for k in moving], name=None if name is None else name + TANGENT, settings=known
        )
        by_index = dict(zip(moving, found, strict=False))
        return results, [by_index[k] if k in by_index else _no_tangent(result) for k, result in enumerate(results)]

    def _transpose_rule(self, cotangents: Any, *inputs: Any, name: str | None, settings: CallSettings) -> list[Any]:
        wanted = [k for k, each in enumerate(inputs) if ad.is_undefined_primal(each)]
        gradients = [ad.instantiate_zeros(cotangents[k]) for k in wanted]
        if settings.rows is not None:
            settings = replace(settings, rows=tuple(settings.rows[k] for k in wanted))
        backward = backward_name(None if name is None else name.removesuffix(TANGENT))
        found = self.backward(gradients, [inputs[k].aval.shape for k in wanted], backward, settings)
        by_index = dict(zip(wanted, found, strict=True))
        return [by_index.get(k) for k in range(len(inputs))]

    def _batching_rule(
        self, arrays: Any, axes: Any, *, name: str | None, settings: CallSettings
    ) -> tuple[list[Any], list[Any]]:
        if self.by_rows:  # The mapped dimension is moved after the rows.
            arrays = [
                array if axis is None else jax.numpy.moveaxis(array, axis, 1)
                for array, axis in zip(arrays, axes, strict=True)
            ]
            axes = [axis if axis is None else 1 for axis in axes]
        results = self.primitive.bind(*arrays, name=name, settings=settings)
        return results, [*axes, *[None] * (len(results) - len(axes))]

    def _partial_eval(self, saveable: Any, unknown: Any, instantiated: Any, equation: Any) -> Any:
        """Rename collectives that `jax.checkpoint` recomputes, since they may run concurrently with the first ones."""
        missing = [
            atom
            for atom, there in zip(equation.invars, instantiated, strict=True)
            if isinstance(atom, jax.extend.core.Var) and not there
        ]
        many = len(equation.outvars)
        if any(unknown):
            return None, equation, [True] * many, [True] * many, missing
        avals = [atom.aval for atom in equation.invars]
        if _saves_result(saveable(equation.primitive, *avals, **equation.params)):
            return equation, None, [False] * many, [False] * many, []
        name = equation.params["name"]
        again = equation.replace(params={**equation.params, "name": None if name is None else name + AGAIN})
        return equation, again, [False] * many, [True] * many, missing

    def _lower_cpu(self, context: Any, *operands: Any, name: str | None, settings: CallSettings) -> Any:
        expect_one_device()
        if name is None:
            raise ArgumentError(f'{self.kind} needs a name in a compiled program: give name="...", equal on all ranks')
        shapes = [aval.shape for aval in context.avals_in]
        attributes = self._make_attributes(shapes, settings) | {"name": name}
        sent = context.replace(avals_out=context.avals_out[: len(operands)])
        aliases = {k: k for k in range(len(operands))} if self.in_place else {}
        lower = jax.ffi.ffi_lowering(TARGET, has_side_effect=True, operand_output_aliases=aliases)
        results = list(lower(sent, *operands, **attributes))
        if self.gathers:
            rows = attributes["rows"].reshape(len(operands), -1).astype(np.int32)
            results.append(mlir.ir_constant(rows))
        return results

    def _lower_elsewhere(self, context: Any, *operands: Any, name: str | None, settings: CallSettings) -> Any:
        others = [platform for platform in context.module_context.platforms if platform != "cpu"]
        raise UnsupportedOperationError(
            f"{self.kind} {name!r} is in a program for {' and '.join(others)}; the engine works in main memory "
            'for now: compile it for the processor, with jax.default_device(jax.local_devices(backend="cpu")[0]) or '
            "JAX_PLATFORMS=cpu, or call it outside of the program with arrays that lie there"
        )

    def _make_attributes(self, shapes: list[Shape], settings: CallSettings) -> dict[str, Any]:
        """Return the attributes of a call in a compiled program."""
        process_set = settings.process_set
        placed = self.by_rows
        if settings.splits is not None:
            raise UnsupportedOperationError(_SPLITS)
        rows = [self.infer_rows(shape, k, settings) for k, shape in enumerate(shapes)] if self.gathers else [()]
        steps = settings.optimizer is not None
        return {
            "kind": np.int32(OPERATIONS.index(self.kind)),
            "op": np.int32(settings.op),
            "wire": np.int32(WIRES[settings.wire]),
            "flags": np.int32(GROUP * settings.grouped | MARKS_STEP * steps),
            "set": np.int32(process_set.call_number),
            "root": np.int32(settings.root),
            "optimizer": np.int32(settings.optimizer or 0),
            "rank": np.int32(process_set.engine.rank if placed else 0),
            "ranks": np.int32(process_set.size() if placed else 0),
            "linger_ns": np.int64(LINGER_NS * settings.grouped),
            "prescale": np.float64(settings.prescale),
            "postscale": np.float64(settings.postscale),
            "rows": np.array([count for each in rows for count in each] or [0], np.int64),
        }


class AllreduceCollective(Collective):
    """Allreduce, whose gradient is the same reduction of the gradients: Sum, Average or Adasum."""

    kind = "allreduce"
    in_place = True  # Local gradients are usually not used after their reduction.

    def run(self, arrays: list[Any], name: str | None, settings: CallSettings) -> list[Any]:
        s = settings
        given = s.op, name, s.prescale, s.postscale, s.process_set, MARKERS[s.wire]
        results = groups.grouped_allreduce(arrays, *given) if s.grouped else [collectives.allreduce(arrays[0], *given)]
        if s.optimizer is not None:
            s.process_set.engine.mark_step(s.optimizer)
        return results

    def backward(
        self, gradients: list[Any], shapes: list[Shape], name: str | None, settings: CallSettings
    ) -> list[Any]:
        return self(gradients, name, settings)


class BroadcastCollective(Collective):
    """Broadcast, whose gradient flows back to the root."""

    kind = "broadcast"

    def run(self, arrays: list[Any], name: str | None, settings: CallSettings) -> list[Any]:
        return [collectives.broadcast(arrays[0], settings.root, name, settings.process_set)]

    def backward(
        self, gradients: list[Any], shapes: list[Shape], name: str | None, settings: CallSettings
    ) -> list[Any]:
        reducing = CallSettings(
            settings.process_set, choose_backward_op(settings.mathematical), mathematical=settings.mathematical
        )
        [total] = ALLREDUCE(gradients, name, reducing)
        is_root = np.bool_(topology.rank() == settings.root)
        return [jax.numpy.where(is_root, total, jax.numpy.zeros_like(total))]  # All ranks take part in the allreduce.


class AllgatherCollective(Collective):
    """Allgather, whose gradient is a reduce-scatter if that divides the rows in the same way, else an allreduce."""

    kind = "allgather"
    by_rows = gathers = True

    def run(self, arrays: list[Any], name: str | None, settings: CallSettings) -> list[Any]:
        handle: Any
        if settings.grouped:
            handle = groups.grouped_allgather_async(arrays, name, settings.process_set)
            results = list(handle.wait())
            return [*results, np.array(handle.rows, np.int32).reshape(len(arrays), -1)]
        handle = collectives.allgather_async(arrays[0], name, settings.process_set)
        return [handle.wait(), np.array([handle.rows], np.int32)]

    def infer_rows(self, shape: Shape, index: int, settings: CallSettings) -> Rows:
        return (shape[0],) * settings.process_set.size() if settings.rows is None else settings.rows[index]

    def backward(
        self, gradients: list[Any], shapes: list[Shape], name: str | None, settings: CallSettings
    ) -> list[Any]:
        process_set = settings.process_set
        back = CallSettings(
            process_set,
            choose_backward_op(settings.mathematical),
            grouped=settings.grouped,
            mathematical=settings.mathematical,
        )
        rows = [self.infer_rows(shape, k, settings) for k, shape in enumerate(shapes)]
        if all(each == divide_rows(sum(each), len(each)) for each in rows):
            return REDUCESCATTER(gradients, name, back)
        totals = ALLREDUCE(gradients, name, back)
        rank = process_set.engine.rank
        return [total[sum(each[:rank]) : sum(each[: rank + 1])] for total, each in zip(totals, rows, strict=True)]


class ReducescatterCollective(Collective):
    """Reduce-scatter, whose gradient of each row comes from the rank that received the row."""

    kind = "reducescatter"
    by_rows = True

    def run(self, arrays: list[Any], name: str | None, settings: CallSettings) -> list[Any]:
        s = settings
        given = s.op, name, s.prescale, s.postscale, s.process_set, MARKERS[s.wire]
        if s.grouped:
            return groups.grouped_reducescatter(arrays, *given)
        return [collectives.reducescatter(arrays[0], *given)]

    def infer_shape(self, shape: Shape, index: int, settings: CallSettings) -> Shape:
        if not shape:
            raise ArgumentError("reducescatter divides rows: an array without dimensions has none")
        process_set = settings.process_set
        return divide_rows(shape[0], process_set.size())[process_set.engine.rank], *shape[1:]

    def backward(
        self, gradients: list[Any], shapes: list[Shape], name: str | None, settings: CallSettings
    ) -> list[Any]:
        s = settings
        factor = scatter_factor(s.op, s.prescale, s.postscale, s.mathematical, s.process_set)
        rows = tuple(divide_rows(shape[0], s.process_set.size()) for shape in shapes)
        back = CallSettings(s.process_set, grouped=s.grouped, mathematical=s.mathematical, rows=rows)
        return [total * np.array(factor, total.dtype) for total in ALLGATHER(gradients, name, back)]


class AlltoallCollective(Collective):
    """All-to-all, whose gradient is sent back to the ranks from which the rows came."""

    kind = "alltoall"
    by_rows = gathers = True

    def run(self, arrays: list[Any], name: str | None, settings: CallSettings) -> list[Any]:
        splits = None if settings.splits is None else list(settings.splits)
        handle = collectives.alltoall_async(arrays[0], splits, name, settings.process_set)
        result = handle.wait()
        return [result if splits is None else result[0], np.array([handle.rows], np.int32)]

    def infer_rows(self, shape: Shape, index: int, settings: CallSettings) -> Rows:
        if settings.rows is not None:
            return settings.rows[index]
        size = settings.process_set.size()
        if settings.splits is not None:
            raise UnsupportedOperationError(_SPLITS)
        if not shape or shape[0] % size:
            raise ArgumentError(f"{list(shape[:1])} rows cannot be divided equally among {size} ranks")
        return (shape[0] // size,) * size

    def backward(
        self, gradients: list[Any], shapes: list[Shape], name: str | None, settings: CallSettings
    ) -> list[Any]:
        [shape] = shapes
        size = settings.process_set.size()
        came = self.infer_rows(shape, 0, settings)
        sent = (shape[0] // size,) * size if settings.splits is None else settings.splits
        back = replace(settings, splits=None if len({*came, *sent}) == 1 else came, rows=(sent,))
        [gradient] = self(gradients, name, back)
        unsent = shape[0] - sum(sent)
        return [jax.numpy.pad(gradient, [(0, unsent)] + [(0, 0)] * (len(shape) - 1)) if unsent else gradient]


ALLREDUCE, BROADCAST, ALLGATHER = AllreduceCollective(), BroadcastCollective(), AllgatherCollective()
REDUCESCATTER, ALLTOALL = ReducescatterCollective(), AlltoallCollective()


def register_handler() -> None:
    """Register the compiled handler with JAX, before the first program is compiled or loaded from a cache."""
    loaded = ctypes.CDLL(find_library("xla_call"))
    loaded.engine_xla_use.argtypes = [ctypes.c_void_p]
    loaded.engine_xla_use.restype = None
    loaded.engine_xla_use(calls.address())
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(loaded.engine_xla_collective), platform="cpu")


def expect_one_device() -> None:
    """Raise EngineError unless JAX has one CPU device, since XLA would call a collective once for each device."""
    try:
        count = len(jax.local_devices(backend="cpu"))
    except RuntimeError as error:
        raise EngineError(
            f"JAX has no device for the processor in this process ({error}), and the engine works in main memory for "
            'now: set JAX_PLATFORMS=cpu, or with an accelerator JAX_PLATFORMS="cuda,cpu"'
        ) from error
    if count > 1:
        raise EngineError(
            f"this process has {count} local devices, and a rank has one: start as many ranks as there are devices to "
            "be, and leave out --xla_force_host_platform_device_count and jax_num_cpu_devices"
        )


def is_compiled(value: Any) -> bool:
    """Return whether a value is a tracer of a program that will be compiled."""
    return isinstance(_unwrap_tracer(value), pe.DynamicJaxprTracer)


def _unwrap_tracer(value: Any) -> Any:
    """Unwrap tracers of `grad` and `vmap` to an array, or to a tracer of a program."""
    while isinstance(value, jax.core.Tracer) and not isinstance(value, pe.DynamicJaxprTracer):
        inner = getattr(value, "primal", getattr(value, "val", None))
        if inner is None:
            break
        value = inner
    return value


def _no_tangent(result: Any) -> Any:
    """Return the zero tangent of a result that does not depend on the differentiated inputs."""
    floating = jax.numpy.issubdtype(result.dtype, jax.numpy.inexact)
    return ad.Zero(jax.core.ShapedArray(result.shape, result.dtype if floating else jax.dtypes.float0))


def _known_rows(rows: Any, members: list[int]) -> tuple[Rows, ...] | None:
    """Return the numbers of rows from each rank for the arrays `members`; None if they are not known yet."""
    found = _unwrap_tracer(rows)
    if isinstance(found, jax.core.Tracer):
        return None
    return tuple(tuple(int(count) for count in found[k]) for k in members)


def _saves_result(policy: Any) -> bool:
    """Return whether the answer of a `jax.checkpoint` policy is to save a result, not to recompute it."""
    return policy if isinstance(policy, bool) else type(policy).__name__ != "RecomputeType"
