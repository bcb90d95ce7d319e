"""Broadcast of one rank's state to all ranks: parameters, buffers, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from ..collectives import objects
from ..collectives.collectives import barrier, broadcast_async_
from ..collectives.failures import announce_failure
from ..collectives.process_sets import ProcessSet, global_process_set
from ..errors import UnsupportedTensorError
from ..frameworks.first_step import compute_checksum, expect_one_order
from ..session import runtime, topology
from .adapter import check
from .ops import broadcast_async_ as broadcast_tensor
from .optimizer_state import UNNAMED, has_order, load_named_state, named_state, parameter_names


class _TensorSlot(NamedTuple):
    """Placeholder of a tensor in a structure that is sent without its tensors."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def broadcast_parameters(params: Any, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Copy the parameters of one rank to every rank, in place. Collective.

    Parameters
    ----------
    params : mapping, or iterable of (str, torch.Tensor)
        `model.state_dict()`, which includes buffers, or `model.named_parameters()`, or a list of tensors.
    root_rank : int
        World rank whose values are sent.
    process_set : ProcessSet, optional
        Process set whose ranks take part, including the root.

    Raises
    ------
    MismatchError
        The ranks' names, dtypes or shapes differ; all ranks raise it, before anything is changed.
    UnsupportedTensorError
        An entry is not a tensor, or its device or layout is not supported.
    """
    if runtime.is_waiting():
        return  # A world begins with a broadcast of the elastic state.
    try:
        named = _collect_tensors(params)
        ties = ties_of(named)
        described = {name: (objects.describe(name, tensor) + ties.get(name, ""), 0) for name, tensor in named}
        if len(described) < len(named):
            raise ValueError(f"broadcast_parameters: two entries have the name {_find_repeated_name(named)!r}")
    except Exception as error:
        announce_failure(process_set, "allgather", None, error)  # The others submit an allgather here.
        raise
    title = "broadcast_parameters: the ranks do not hold the same model"
    order, tensors = objects.compare_descriptions(described, title, None, process_set), dict(named)
    for handle in [broadcast_tensor(tensors[name], root_rank, None, process_set) for name in order]:
        handle.wait()


def _collect_tensors(params: Any) -> list[tuple[str, torch.Tensor]]:
    """Return names and tensors that can be broadcast; raise UnsupportedTensorError for others."""
    named = [(name, tensor) for name, tensor in objects.name_tensors(params) if tensor is not None]
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedTensorError(
                f"{name!r} is a {type(tensor).__qualname__}, not a torch.Tensor; send it with broadcast_object"
            )
        if torch.nn.parameter.is_lazy(tensor):
            raise UnsupportedTensorError(
                f"{name!r} belongs to a lazy module and has no shape yet: run one batch through the model first"
            )
        check(tensor, repr(name))
        if any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True)):
            raise UnsupportedTensorError(
                f"{name!r} has elements that share memory, as of expand(), and cannot be written to: give the module "
                "a clone() of it"
            )
    return named


def _find_repeated_name(named: list[tuple[str, torch.Tensor]]) -> str:
    """Return the first name that an earlier entry has, too."""
    names = [name for name, _ in named]
    return next(name for place, name in enumerate(names) if name in names[:place])


def ties_of(named: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Return a suffix of the description for each tensor that has the same memory as another one, such as tied weights.

    If tensors were tied on one rank and not on another, both names would get the values of one.
    """
    first: dict[tuple[Any, ...], str] = {}
    ties: dict[str, str] = {}
    for name, tensor in sorted(named, key=lambda each: each[0]):
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.numel():
            key = tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
            own = first.setdefault(key, name)
            if own != name:
                ties[name] = f" tied to {own!r}"
    return ties


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None, process_set: ProcessSet = global_process_set
) -> None:
    """Copy the optimizer state of one rank to every rank: moments, step counts, learning rates. Collective.

    The other ranks may have no state yet, for example if only the root has loaded a checkpoint.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Optimizer, wrapped or not, with the same parameter groups on every rank. Its state gets the root's values and
        dtypes.
    root_rank : int
        World rank whose state is sent.
    model : torch.nn.Module, optional
        Module of the parameters, by whose names they are matched between ranks. Names of `DistributedOptimizer` or of
        the optimizer itself are used, too. Unnamed parameters are matched by their positions.
    process_set : ProcessSet, optional
        Process set whose ranks take part.

    Raises
    ------
    MismatchError
        The ranks' parameter groups have different parameters; all ranks raise it, before anything is changed.
    """
    if runtime.is_waiting():
        return  # As above.
    # Every parameter of an optimizer can be described, so this does not fail on one rank alone.
    names = parameter_names(optimizer, [model] if isinstance(model, torch.nn.Module) else [])
    described = {
        name: (f"{objects.describe('', parameter)} in group {g}{f' at place {p}' if has_order(optimizer) else ''}", 0)
        for g, (group, own) in enumerate(zip(optimizer.param_groups, names, strict=True))
        for p, (name, parameter) in enumerate(zip(own, group["params"], strict=True))
    }
    objects.compare_descriptions(
        described, "broadcast_optimizer_state: the ranks' optimizers have different parameters", None, process_set
    )
    _expect_one_order(optimizer, names, process_set)
    tensors: list[torch.Tensor] = []

    def take_out(tensor: torch.Tensor) -> _TensorSlot:
        check(tensor, "a tensor of the optimizer's state")
        # The broadcasts are in place, and two of them must not share memory of the root's state.
        tensors.append(tensor.detach().cpu().contiguous())
        return _TensorSlot(tensor.dtype, tuple(tensor.shape))

    def make_room(slot: _TensorSlot) -> torch.Tensor:
        tensors.append(torch.empty(slot.shape, dtype=slot.dtype, device="cpu"))
        return tensors[-1]

    is_root = topology.rank() == root_rank
    try:
        state = _replace_entries(named_state(optimizer, names), torch.Tensor, take_out) if is_root else None
    except Exception as error:
        barrier(process_set=process_set)  # The others are in `broadcast_object`, which begins with a barrier, too.
        announce_failure(process_set, "broadcast", None, error)
        raise
    skeleton = objects.broadcast_object(state, root_rank, None, process_set)
    received: Any = None if is_root else _replace_entries(skeleton, _TensorSlot, make_room)
    for handle in [broadcast_async_(tensor, root_rank, None, process_set) for tensor in tensors]:
        handle.wait()
    if not is_root:
        load_named_state(optimizer, received, names)
    elif renew := getattr(optimizer, "renew_pending", None):  # of OuterOptimizer: the other ranks send what they loaded
        renew()


def _expect_one_order(optimizer: torch.optim.Optimizer, names: list[list[str]], process_set: ProcessSet) -> None:
    """Raise MismatchError if parameters without names are the same on two ranks, in another order. Collective."""
    unnamed = {
        name: parameter
        for group, own in zip(optimizer.param_groups, names, strict=True)
        for name, parameter in zip(own, group["params"], strict=True)
        if name.startswith(UNNAMED)
    }
    if len(unnamed) > 1:  # the same number on all ranks
        sums = np.array([compute_checksum(parameter) for parameter in unnamed.values()], np.uint64)
        expect_one_order(list(unnamed), objects.allgather_object(sums, None, process_set), process_set.ranks)


def _replace_entries(value: Any, kind: type, replace: Callable[[Any], Any]) -> Any:
    """Return a structure like `value`, in which the results of a function replace the entries of a class, in order."""
    if isinstance(value, kind):
        return replace(value)
    if isinstance(value, dict):
        return {key: _replace_entries(entry, kind, replace) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replace_entries(entry, kind, replace) for entry in value)
    return value
