"""Horovod's functions for the tensors of one framework, generated from a table of their names and argument orders.

A binding calls `make_functions` once, with a description of its tensors (`Tensors`), and gets a function for each row
of the table, with its signature and docstring. For type checkers `render_stub` writes the same signatures; a test
compares them with the file beside the binding.

Each function first checks its tensors, then chooses the operation. Then it calls the engine's collective of the same
name, or the framework's differentiable replacement of it.
"""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..collectives import collectives, groups
from ..collectives.compression import MARKERS, Compression, resolve
from ..collectives.failures import announce_failure
from ..collectives.handles import Handle
from ..collectives.process_sets import ProcessSet, global_process_set
from ..collectives.reduce_ops import Average, Op, Sum
from ..errors import EngineError
from ..session import runtime, topology

# Each parameter with its type, and its default unless a row of the table has another one.
PARAMETERS = {
    "tensor": "tensor: Tensor",
    "tensors": "tensors: Sequence[Tensor]",
    "root_rank": "root_rank: int",
    "splits": "splits: Any = None",
    "average": "average: bool | None = None",
    "name": "name: str | None = None",
    "compression": "compression: Any = Compression.none",
    "op": "op: int | None = None",
    "op=Average": "op: int | None = Average",
    "prescale_factor": "prescale_factor: float = 1.0",
    "postscale_factor": "postscale_factor: float = 1.0",
    "process_set": "process_set: ProcessSet = global_process_set",
    # Parameter of MXNet's functions, without effect here.
    "priority": "priority: int = 0",
    # Parameters of TensorFlow's functions, without effect here.
    "device_dense": 'device_dense: str = ""',
    "device_sparse": 'device_sparse: str = ""',
    "ignore_name_scope": "ignore_name_scope: bool = False",
}

# The parameters of each function in Horovod's order.
ORDERS = {
    "allreduce": "tensor average name compression op prescale_factor postscale_factor process_set",
    "allreduce_": "tensor average name op prescale_factor postscale_factor process_set",
    "allreduce_async": "tensor average name op prescale_factor postscale_factor process_set",
    "allreduce_async_": "tensor average name op prescale_factor postscale_factor process_set",
    "grouped_allreduce": "tensors average name compression op prescale_factor postscale_factor process_set",
    "grouped_allreduce_": "tensors average name op prescale_factor postscale_factor process_set",
    "grouped_allreduce_async": "tensors average name op prescale_factor postscale_factor process_set",
    "grouped_allreduce_async_": "tensors average name op prescale_factor postscale_factor process_set",
    "broadcast": "tensor root_rank name process_set",
    "broadcast_": "tensor root_rank name process_set",
    "broadcast_async": "tensor root_rank name process_set",
    "broadcast_async_": "tensor root_rank name process_set",
    "allgather": "tensor name process_set",
    "allgather_async": "tensor name process_set",
    "grouped_allgather": "tensors name process_set",
    "grouped_allgather_async": "tensors name process_set",
    "alltoall": "tensor splits name process_set",
    "alltoall_async": "tensor splits name process_set",
    "reducescatter": "tensor name compression op=Average process_set prescale_factor postscale_factor",
    "reducescatter_async": "tensor name op=Average process_set prescale_factor postscale_factor",
    "grouped_reducescatter": "tensors name compression op=Average process_set prescale_factor postscale_factor",
    "grouped_reducescatter_async": "tensors name op=Average process_set prescale_factor postscale_factor",
}

DOCUMENTATION = {
    "allreduce": """Combine a tensor over all ranks. Collective.

    Parameters
    ----------
    tensor : {tensor}
        Tensor in main memory, of any shape and strides, and of a dtype that `engine.allreduce` supports.
    average : bool, optional
        Older form of `op`: True is `Average`, False is `Sum`.
    name : str, optional
        Name of the operation, equal on all ranks.
    compression : optional
        `Compression.none`, `fp16`, `bf16`, `fp8`, `tuned`, `tuned8`, or a user-defined compressor. See
        `engine.Compressor`.
    op : Op, optional
        Operation; `Average` by default.
    prescale_factor, postscale_factor : float, optional
        Factors of the inputs and of the result.

    Returns
    -------
    {tensor}
        Contiguous tensor with the dtype and shape of the input. Gradients flow through it with `Sum`, `Average` and
        `Adasum`: they are reduced over the ranks by the same operation. For Adasum, which is not linear, this is a
        definition.

    Raises
    ------
    EngineError
        Same as for `engine.allreduce`.
    """,
    "allreduce_": "Do the same as `allreduce`, but in place. Returns `tensor`.",
    "allreduce_async": "Start an allreduce. `synchronize` gives its result, a new tensor. See `engine.allreduce`.",
    "allreduce_async_": "Start an allreduce in place. The tensor must not be accessed until `synchronize` returns.",
    "grouped_allreduce": """Combine several tensors over all ranks in one request. Collective.

    See `engine.grouped_allreduce`. Gradients flow through it like through `allreduce`.
    """,
    "grouped_allreduce_": "Do the same as `grouped_allreduce`, but in place. Returns the tensors.",
    "grouped_allreduce_async": """Start a grouped allreduce. `synchronize` gives a list of new tensors.

    See `engine.grouped_allreduce`.
    """,
    "grouped_allreduce_async_": """Start a grouped allreduce in place.

    The tensors must not be accessed until `synchronize` returns.
    """,
    "broadcast": """Return a new tensor with the values of the root rank's. Collective. See `engine.broadcast`.

    Gradients flow back to the root rank, which receives their average over ranks, or their sum with
    `mathematical_gradients`.
    """,
    "broadcast_": "Do the same as `broadcast`, but in place. Returns `tensor`.",
    "broadcast_async": "Start a broadcast. `synchronize` gives its result, a new tensor.",
    "broadcast_async_": "Start a broadcast in place. The tensor must not be accessed until `synchronize` returns.",
    "allgather": """Concatenate the tensors of all ranks along the first dimension. Collective.

    The first dimension may differ by rank. See `engine.allgather`. Gradients flow through it: a rank receives those of
    its own rows, averaged over ranks, or summed with `mathematical_gradients`.
    """,
    "allgather_async": "Start an allgather. `synchronize` gives its result.",
    "grouped_allgather": """Concatenate several tensors over all ranks in one request. Collective.

    See `engine.grouped_allgather`. Gradients flow through it like through `allgather`.
    """,
    "grouped_allgather_async": """Start a grouped allgather. `synchronize` gives a list of new tensors.

    See `engine.grouped_allgather`.
    """,
    "alltoall": """Send rows to each rank, and receive rows from each rank. Collective. See `engine.alltoall`.

    Returns the rows, and with `splits` also their numbers by rank. Gradients flow back to the ranks that sent the rows.
    """,
    "alltoall_async": "Start an all-to-all. `synchronize` gives its result.",
    "reducescatter": """Combine a tensor over all ranks, and return this rank's rows of the result. Collective.

    See `engine.reducescatter`. Gradients flow through it with `Sum` and `Average`: that of a row comes from the rank
    that received the row. With `Sum` it is multiplied by the number of ranks. `mathematical_gradients` divides both
    gradients by this number.
    """,
    "reducescatter_async": "Start a reduce-scatter. `synchronize` gives its result.",
    "grouped_reducescatter": """Combine several tensors in one request, and return this rank's rows of each. Collective.

    See `engine.grouped_reducescatter`. Gradients flow through it like through `reducescatter`.
    """,
    "grouped_reducescatter_async": """Start a grouped reduce-scatter. `synchronize` gives a list of new tensors.

    See `engine.grouped_reducescatter`.
    """,
}

# Part that is removed from the documentation of a function through which no gradients flow.
_GRADIENTS = re.compile(r"\s+Gradients flow .*?(?=\n\n|\Z)", re.DOTALL)

# Arguments that each collective of the engine takes besides the tensors, in its order.
_REDUCTION = "op name prescale_factor postscale_factor process_set"
_GIVEN = {
    "allreduce": _REDUCTION,
    "reducescatter": _REDUCTION,
    "broadcast": "root_rank name process_set",
    "allgather": "name process_set",
    "alltoall": "splits name process_set",
}


@dataclass(frozen=True)
class Tensors:
    """Description of a framework's tensors."""

    kind: type  # class of the tensors
    name: str  # name of the class in user code, such as `torch.Tensor`
    # Differentiable replacements of the engine's collectives, by name, with the same positional arguments
    calls: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    # Converts other values that users may pass to a tensor, and returns anything else unchanged
    convert: Callable[[Any], Any] = lambda tensor: tensor
    gradients: bool = True  # whether gradients flow through the functions, as their documentation says

    def admit_tensor(self, tensor: Any, kind: str, name: str | None, process_set: ProcessSet) -> Any:
        """Return the argument of a call as a tensor. If it is none, announce the failure of the call, and raise."""
        if isinstance(tensor, self.kind):
            return tensor
        converted = self.convert(tensor)
        if isinstance(converted, self.kind):
            return converted
        error = TypeError(f"expected a {self.name}, not {type(tensor).__qualname__}")
        announce_failure(process_set, kind, name, error)
        raise error

    def admit_all(self, tensors: Any, kind: str, name: str | None, process_set: ProcessSet) -> list[Any]:
        """Return the arguments of a call as tensors, like `admit_tensor`."""
        if not isinstance(tensors, Iterable):
            error = TypeError(f"expected a sequence of {self.name}, not {type(tensors).__qualname__}")
            announce_failure(process_set, kind, name, error)
            raise error
        own = self.kind
        return [each if isinstance(each, own) else self.admit_tensor(each, kind, name, process_set) for each in tensors]


def make_functions(module: str, tensors: Tensors, orders: Mapping[str, str] = ORDERS) -> dict[str, Any]:
    """Return Horovod's functions for a framework, by name.

    The module of the given name will contain them. `orders` replaces `ORDERS` for a framework with other
    argument orders in Horovod.
    """
    made = {}
    for name, order in orders.items():
        grouped = name.startswith("grouped")
        space = _NAMES | {"__name__": module, "Tensor": tensors.kind}
        space["_admit"] = tensors.admit_all if grouped else tensors.admit_tensor
        space["_run"] = tensors.calls.get(name) or getattr(groups if grouped else collectives, name)
        head = f"from __future__ import annotations\n{render_signature(name, order)}"
        source = f"{head}:\n    return {_render_body(name, order)}\n"
        file = f"<{module}.{name}>"
        linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
        exec(compile(source, file, "exec"), space)
        made[name] = space[name]
        text = inspect.cleandoc(DOCUMENTATION[name].format(tensor=tensors.name))
        made[name].__doc__ = text if tensors.gradients else _GRADIENTS.sub("", text)
    return made


def render_signature(name: str, order: str) -> str:
    """Return the signature of a function, such as `def allreduce(tensor: Tensor, ...) -> Tensor`."""
    result = "Handle" if "_async" in name else "Any" if name == "alltoall" else "Tensor"
    result = f"list[{result}]" if result == "Tensor" and name.startswith("grouped") else result
    return f"def {name}({', '.join(PARAMETERS[each] for each in order.split())}) -> {result}"


def render_stub(tensor: str, orders: Mapping[str, str] = ORDERS) -> str:
    """Return the unformatted type stub of a framework's functions. `tensor`: class name, such as `torch.Tensor`."""
    package, _, kind = tensor.rpartition(".")
    alias = "" if kind == "Tensor" else " as Tensor"
    signatures = [f"{render_signature(name, order)}: ..." for name, order in orders.items()]
    handle = "from ..collectives.handles import Handle\n" if any("-> Handle" in each for each in signatures) else ""
    head = f'''"""Types of the functions that engine/frameworks/surface.py makes: written by it."""

from collections.abc import Sequence
from typing import Any

from {package} import {kind}{alias}

from ..collectives.compression import Compression
{handle}from ..collectives.process_sets import ProcessSet, global_process_set
from ..collectives.reduce_ops import Average
'''
    return "\n".join([head, *signatures])


def _render_body(name: str, order: str) -> str:
    """Return the expression that a function returns: a call of `_run` with tensors that `_admit` has checked."""
    match = re.match(r"(grouped_)?([a-z]+)", name)
    assert match is not None
    kind, given = match[2], {parameter.partition("=")[0] for parameter in order.split()}
    average = "average" if "average" in given else "None"
    call = f"{kind!r}, name, process_set"  # identifies the call if its failure is announced
    tensor = f"_admit({order.split()[0]}, {call})"
    settings = [f"_choose_op({average}, op, {call})" if each == "op" else each for each in _GIVEN[kind].split()]
    arguments = ", ".join([tensor, *settings])
    if "compression" not in given:
        return f"_run({arguments})"
    return f"_run_compressed({kind!r}, compression, _admit, _run, {match[1] is not None}, {arguments})"


def _run_compressed(
    kind: str, compression: Any, admit: Any, run: Callable[..., Any], grouped: bool, sent: Any, *settings: Any
) -> Any:
    """Compress tensors, call `run` and decompress its results. Gradients flow through the compressor's methods, too."""
    op, name, *_, process_set = settings
    tensors = sent if grouped else [sent]
    try:
        wire, own = resolve(compression, op)
        pairs = [] if own is None else [own.compress(each) for each in tensors]
    except Exception as error:
        announce_failure(process_set, kind, name, error)
        raise
    if own is None:
        return run(sent, *settings, MARKERS[wire])
    packed = [each for each, _ in pairs]
    results = run(admit(packed if grouped else packed[0], kind, name, process_set), *settings, MARKERS[wire])
    results = results if grouped else [results]
    opened = [own.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)]
    return opened if grouped else opened[0]


def choose_op(average: bool | None, op: int | None) -> Op:
    """Return the operation that the old argument `average` or the new `op` chooses.

    Raises ValueError if both are given.
    """
    if average is not None and op is not None:
        raise ValueError("give either average or op, not both; op=Average is the same as average=True, op=Sum as False")
    if average is not None:
        return Average if average else Sum
    return Average if op is None else Op(op)


def _choose_op(average: bool | None, op: int | None, kind: str, name: str | None, process_set: ProcessSet) -> Op:
    """Choose the operation of a call like `choose_op`; a failure is announced to the other ranks."""
    try:
        return choose_op(average, op)
    except ValueError as error:
        announce_failure(process_set, kind, name, error)
        raise


# Names that the functions refer to.
_NAMES: dict[str, Any] = {
    "_choose_op": _choose_op,
    "_run_compressed": _run_compressed,
    "Any": Any,
    "Average": Average,
    "Compression": Compression,
    "Handle": Handle,
    "ProcessSet": ProcessSet,
    "Sequence": Sequence,
    "global_process_set": global_process_set,
}


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the process set has called `barrier`. Collective."""
    collectives.barrier(process_set=process_set)


def join(device: int = -1, process_set: ProcessSet = global_process_set) -> int:
    """Wait until every rank has joined, and return the last one. `device` has no effect.

    Collective. See `engine.join`.
    """
    return collectives.join(process_set)


def init(comm: Any = None, process_sets: Any = None, **settings: Any) -> None:
    """Start the engine, like `engine.init`.

    Parameters
    ----------
    comm : None, mpi4py communicator, or list of ranks or of communicators
        The launcher determines the ranks, so this has to be all of them: `MPI.COMM_WORLD` or `range(size)`. Each
        communicator of a list forms a process set, as in `process_sets`.
    process_sets : iterable of ProcessSet, `"dynamic"`, optional
        Sets to add right after the start.
    **settings
        Settings of `engine.init`.

    Raises
    ------
    EngineError
        `comm` has other ranks than the world; or an error of `engine.init`. A call that fails leaves nothing behind.
    """
    parts = [] if comm is None else list(comm) if isinstance(comm, list | tuple) else [comm]
    is_world = bool(parts) and (len(parts) == 1 or all(isinstance(part, int) for part in parts))
    if parts and not is_world:
        more = () if process_sets == "dynamic" else process_sets or ()
        process_sets = [*map(ProcessSet, parts), *more]
    running = runtime.is_initialized()
    runtime.init(process_sets, **settings)
    if is_world:
        try:
            _expect_world(parts if isinstance(parts[0], int) else parts[0].allgather(topology.rank()))
        except BaseException:
            if not running:
                runtime.shutdown()  # A call that fails leaves nothing behind.
            raise


def _expect_world(ranks: Sequence[int]) -> None:
    if sorted(ranks) != list(range(topology.size())):
        raise EngineError(
            f"init(comm=...) has ranks {sorted(ranks)}, but this job has {topology.size()}: start as many processes as "
            "the world has ranks, and give a part of them to process_sets"
        )
