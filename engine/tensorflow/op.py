"""Collectives of TensorFlow's programs: native ops, or Python if these cannot be used.

The native ops (engine_ext/bindings/tensorflow_op.c) are asynchronous kernels that TensorFlow's C API registers. In a
graph they hold no thread, and named ones run concurrently in any order. Unnamed ones are matched between ranks by their
number, so they run in the order of the program.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ..collectives.reduce_ops import Op
from ..errors import EngineError
from ..metrics.names import OPERATIONS
from . import fallback, gradients, library, order
from .call import Call
from .names import once_in_graph

# Wait of the submitting thread for the end of an op: enum of tensorflow_op.c.
_NOT_AT_ALL, _FIRST_OF_STEP, _BRIEFLY, _FOREVER = range(4)

_module = library.load()
_tried = False
native: bool = _module is not None
"""Whether collectives are native ops."""


def _get_native_ops() -> Any:
    """Return the wrappers of the native ops, which the first call tests; None: collectives are calls of Python."""
    global _module, _tried, native
    if not _tried and _module is not None and not library.is_compatible(_module):
        _module, native = None, False
    _tried = True
    return _module


def reduce(call: Call, tensors: Sequence[Any]) -> list[Any]:
    """Submit an allreduce, reduce-scatter, broadcast or barrier. Gradients flow through it.

    It takes one tensor, any number with `call.group`, and none for a barrier. If the engine refuses the operation or it
    fails, `tf.errors.OpError` is raised in eager mode, or when the graph runs. Raises EngineError while a function that
    XLA will compile is traced.
    """
    call = _named_in_session(call)
    module = _get_native_ops()
    if module is None:
        return _through_python(call, tensors, None)[0]
    if call.kind == "reducescatter":
        results = _submit(module.engine_scatter, call, tensors)
        _tell_rows(tensors, results)
    else:
        results = _submit(module.engine_reduce, call, tensors)
    return list(results) if tensors else []


def exchange_rows(call: Call, tensors: Sequence[Any], splits: Any = None) -> tuple[list[Any], Any]:
    """Submit an allgather, or an all-to-all with `splits` (int64). Gradients flow through it.

    Empty `splits` divide the rows equally. Also returned are the rows of each tensor from each rank: int32, of shape
    (tensors, ranks). Errors are those of `reduce`.
    """
    call = _named_in_session(call)
    module = _get_native_ops()
    if module is None:
        return _through_python(call, tensors, splits)
    if call.kind == "alltoall":
        results, rows = _submit(module.engine_exchange, call, tensors, splits)
    else:
        results, rows = _submit(module.engine_gather, call, tensors)
    _tell_rows(tensors, results)
    if not tf.executing_eagerly():
        rows.set_shape([len(tensors), None])
    return list(results), rows


def read_rank_and_size(number: int) -> tuple[Any, Any]:
    """Return this rank's number in a process set and the set's size (int32), evaluated when the program runs."""
    module = _get_native_ops()
    if module is None:
        return fallback.read_rank_and_size(number)
    rank, size = module.engine_place(set=number)
    if not tf.executing_eagerly():
        rank.set_shape([])
        size.set_shape([])
    return rank, size


def blocks_thread() -> bool:
    """Return whether each collective that is added to the graph now holds a thread, so that fewer are better."""
    return _get_native_ops() is None and order.is_of_session(tf.compat.v1.get_default_graph())


def expect_no_xla() -> None:
    """Raise EngineError if a function that XLA will compile is being traced, since it cannot run collectives."""
    from tensorflow.python.ops import control_flow_util

    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise EngineError(
            "a collective cannot be compiled by XLA: use tf.function(jit_compile=False), and model.compile("
            "jit_compile=False) with Keras, for the function that communicates; what it calls may be compiled"
        )


def _named_in_session(call: Call) -> Call:
    """Give a call in the graph of a session a unique name, since such a graph has no program order.

    An unnamed call gets a name. So does the gradient of a call, which a program may compute once for each result. The
    graph makes the names unique: they are equal on ranks that build the same graph.
    """
    if tf.executing_eagerly() or not order.is_of_session(graph := tf.compat.v1.get_default_graph()):
        return call
    if call.name is None:
        return call._replace(name=graph.unique_name(f"{call.kind}.session"))
    return call._replace(name=once_in_graph(call.name)) if call.backward else call


def _submit(wrapper: Any, call: Call, tensors: Sequence[Any], *more: Any) -> Any:
    """Submit a native op in its order (engine/tensorflow/order.py), and return its outputs."""
    if tf.executing_eagerly():
        return wrapper(tensors, *more, **_make_attributes(call, _FOREVER))
    expect_no_xla()
    if call.name is None:
        with order.after_the_last():
            outputs = wrapper(tensors, *more, **_make_attributes(call, _BRIEFLY))
        order.keep_in_order(_operation_of(outputs))
    else:
        with order.after_the_last(call.name):
            outputs = wrapper(
                tensors, *more, **_make_attributes(call, _NOT_AT_ALL if call.overlaps else _FIRST_OF_STEP)
            )
        order.keep_apart(_operation_of(outputs), call.name)
    return outputs


def _operation_of(outputs: Any) -> Any:
    while isinstance(outputs, list | tuple):
        outputs = outputs[0]
    return getattr(outputs, "op", outputs)  # Without outputs the wrapper returns the operation itself.


def _make_attributes(call: Call, linger: int) -> dict[str, Any]:
    """Return the attributes of the native op of a call."""
    return {
        "kind": OPERATIONS.index(call.kind),
        "set": call.set,
        "operation": call.name or "",
        "group": call.group,
        "op": int(call.op),
        "wire": call.wire,
        "prescale": _encode_factor(call.prescale),
        "postscale": _encode_factor(call.postscale),
        "root": call.root,
        "mathematical": call.mathematical,
        "linger": linger,
        "optimizer": call.optimizer,
        "depth": order.count_scopes(call.backward),
    }


def _encode_factor(factor: float) -> int:
    """Encode a float as an integer attribute of an op, since float attributes have only single precision."""
    return int(struct.unpack("<q", struct.pack("<d", factor))[0])


def _decode_factor(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


def _call_of(op: Any) -> Call:
    """Return the call that a native op was created for."""
    return Call(
        OPERATIONS[op.get_attr("kind")],
        tf.compat.as_text(op.get_attr("operation")) or None,
        op.get_attr("set"),
        Op(op.get_attr("op")),
        op.get_attr("wire"),
        _decode_factor(op.get_attr("prescale")),
        _decode_factor(op.get_attr("postscale")),
        op.get_attr("root"),
        op.get_attr("group"),
        op.get_attr("mathematical"),
        op.get_attr("linger") == _NOT_AT_ALL,
        op.get_attr("optimizer"),
    )


@tf.RegisterGradient("EngineReduce")
@tf.RegisterGradient("EngineScatter")
def _gradient_of_reduction(op: Any, *outputs: Any) -> Any:
    return gradients.differentiate_call(_call_of(op), op.inputs, None, outputs)


@tf.RegisterGradient("EngineGather")
def _gradient_of_gather(op: Any, *outputs: Any) -> Any:
    return gradients.differentiate_call(_call_of(op), op.inputs, op.outputs[-1], outputs[:-1])


@tf.RegisterGradient("EngineExchange")
def _gradient_of_exchange(op: Any, *outputs: Any) -> Any:
    return [*gradients.differentiate_call(_call_of(op), op.inputs[:1], op.outputs[-1], outputs[:1]), None]


tf.no_gradient("EnginePlace")
tf.no_gradient("EngineProbe")


def _through_python(call: Call, tensors: Sequence[Any], splits: Any) -> tuple[list[Any], Any]:
    """Run a collective in Python, with its gradient."""
    if not tf.executing_eagerly():
        expect_no_xla()
    if call.kind == "barrier":
        return fallback.reduce(call, []), None
    count = len(tensors)
    gathers = call.kind in ("allgather", "alltoall")

    @tf.custom_gradient
    def run(*inputs: Any) -> tuple[Any, Callable[..., Any]]:
        if gathers:
            results, rows = fallback.exchange_rows(call, inputs, splits)
        else:
            results, rows = fallback.reduce(call, inputs), None
        _tell_shapes(call, inputs, results, rows)
        outputs = tuple(results) if rows is None else (*results, rows)
        return outputs, lambda *given: gradients.differentiate_call(call, inputs, rows, given[:count])

    outputs = run(*tensors)
    return (list(outputs[:count]), outputs[count]) if gathers else (list(outputs), None)


def _tell_rows(tensors: Sequence[Any], results: Sequence[Any]) -> None:
    """Set the static shapes of results to those of the tensors, except for the number of rows."""
    if tf.executing_eagerly():
        return
    for tensor, result in zip(tensors, results, strict=True):
        if tensor.shape.rank is not None:
            result.set_shape([None, *tensor.shape[1:]])


def _tell_shapes(call: Call, tensors: Sequence[Any], results: Sequence[Any], rows: Any) -> None:
    """Set the static shapes of results from Python, as far as they are known."""
    if tf.executing_eagerly():
        return
    if rows is not None:
        rows.set_shape([len(results), None])
    if call.kind in ("allgather", "alltoall", "reducescatter"):
        _tell_rows(tensors, results)
        return
    for tensor, result in zip(tensors, results, strict=True):
        result.set_shape(tensor.shape)
