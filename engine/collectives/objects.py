"""Collectives for Python objects, and the check that ranks hold the same parameters.

Objects are sent pickled. Only ranks that have proven the job's secret take part, so that no stranger's pickle is
loaded.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import EngineError, MismatchError, UnsupportedTensorError
from ..errors.formatting import format_exception
from ..native import memory
from ..text import readable
from .adapters import adapter_of
from .collectives import barrier, broadcast_, broadcast_async_
from .failures import announce_failure
from .process_sets import ProcessSet, global_process_set

Described = dict[str, tuple[str, int]]  # by name: a description, and a checksum of the value, or 0 if it may differ
_FAILED = b"!"  # No pickle begins with this byte.
_SHOWN = 20  # largest number of differences in a report


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send the object of one rank to every rank. Collective.

    Parameters
    ----------
    obj : object
        Object that can be pickled; ignored except on the root.
    root_rank : int
    name : str, optional
        Name of the operation, equal on all ranks.
    process_set : ProcessSet, optional
        Process set whose ranks take part.

    Returns
    -------
    object
        `obj` itself on the root, a copy elsewhere.

    Raises
    ------
    EngineError
        The object cannot be pickled; every rank raises.
    """
    failure: Exception | None = None
    data = b""
    if name is None:
        barrier(process_set=process_set)  # After it the ranks agree on the number of unnamed operations.
    world_rank = process_set.engine.numbers[process_set.engine.rank]
    if world_rank == root_rank:
        try:
            data = pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # `__reduce__` may raise anything, and the other ranks have to learn of it.
            failure = error
    if failure is not None:
        data = _encode_failure(failure)
    header = np.array([len(data)], np.int64)
    broadcast_(header, root_rank, name and f"{name}.size", process_set)
    payload = np.frombuffer(data, np.uint8).copy() if data else np.empty(int(header[0]), np.uint8)
    broadcast_(payload, root_rank, name and f"{name}.data", process_set)
    if (why := _why_failed(payload)) is not None:
        raise EngineError(f"rank {root_rank} cannot pickle the object that it broadcasts: {why}") from failure
    return obj if data else pickle.loads(payload.data)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Collect one object of each rank. Collective.

    Parameters
    ----------
    obj : object
        Object that can be pickled.
    name : str, optional
        Name of the operation, equal on all ranks.
    process_set : ProcessSet, optional
        Process set whose ranks take part.

    Returns
    -------
    list
        Copies of the objects, in rank order.

    Raises
    ------
    EngineError
        An object cannot be pickled; every rank raises, naming the rank.
    """
    return gather_objects(obj, name, process_set, "has no object to give: collect objects before join()")


def gather_objects(obj: Any, name: str | None, process_set: ProcessSet, lacks: str) -> list[Any]:
    """Collect objects like `allgather_object`; `lacks` ends the error text about a rank that has joined."""
    failure: Exception | None = None
    data = b""
    try:
        data = pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # As above.
        failure, data = error, _encode_failure(error)
    handle = process_set.engine.allgather(np.frombuffer(data, np.uint8), name, True)
    handle.wait()
    payload, rows = handle.gathered
    for rank, count in zip(process_set.ranks, rows, strict=True):
        if count == 0:
            raise EngineError(f"rank {rank} has joined, and {lacks}")
    objects, start = [], 0
    for rank, count in zip(process_set.ranks, rows, strict=True):
        if (why := _why_failed(payload[start : start + count])) is not None:
            raise EngineError(f"rank {rank} cannot pickle the object that it gathers: {why}") from failure
        objects.append(pickle.loads(payload[start : start + count]))
        start += count
    return objects


def _encode_failure(error: Exception) -> bytes:
    """Return the bytes that are sent in place of a pickle, with the reason why there is none."""
    return _FAILED + format_exception(error).encode(errors="replace")


def _why_failed(payload: Any) -> str | None:
    """Return the reason that was sent in place of a pickle; None if `payload` is a pickle."""
    if bytes(payload[: len(_FAILED)]) != _FAILED:
        return None
    return readable.replace_unprintable(bytes(payload[len(_FAILED) :]).decode(errors="replace"))


def name_tensors(params: Any) -> list[tuple[str, Any]]:
    """Return names and tensors of a mapping, of pairs (as in `named_parameters()`), or of tensors (named by number)."""
    if isinstance(params, Mapping):
        return [(str(name), value) for name, value in params.items()]
    if not isinstance(params, Iterable) or isinstance(params, str | bytes):
        raise TypeError(f"expected a mapping or an iterable of (name, tensor), not {type(params).__qualname__}")
    named = []
    for index, entry in enumerate(params):
        if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str):
            named.append(entry)
        else:
            named.append((str(index), entry))
    return named


def describe(name: str, value: Any) -> str:
    """Describe a tensor as `float32[3, 4]`, and a number or a string by its type and value.

    Raises UnsupportedTensorError for anything else.
    """
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{_dtype_name(value.dtype)}{list(value.shape)}"
    if isinstance(value, bool | int | float | str | None):
        return f"{type(value).__name__} {value!r}"
    raise UnsupportedTensorError(f"{name!r} is a {type(value).__qualname__}, not a tensor")


def _dtype_name(dtype: Any) -> str:
    """Return the common name of a dtype, such as `float32` for `torch.float32`, a `tf.DType` or a NumPy class."""
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return str(name).rpartition(".")[2]


def check_consistency(params: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> None:
    """Check that all ranks hold the same parameters, bit by bit. Collective.

    Parameters
    ----------
    params : mapping, or iterable of (str, tensor)
        Result of `state_dict()` or `named_parameters()`; numbers and strings among the values are compared too.
    name : str, optional
        Name of the operation, equal on all ranks.

    Raises
    ------
    MismatchError
        Parameters differ; every rank raises the same text. It lists the parameters and ranks that differ from the
        majority (from rank 0 in a tie), by presence, dtype, shape or value.
    """
    described: Described = {}
    try:
        for key, value in name_tensors(params):
            is_tensor = hasattr(value, "dtype")
            described[key] = (
                describe(key, value),
                memory.checksum(adapter_of(value).as_input(value)) if is_tensor else 0,
            )
    except Exception as error:
        announce_failure(process_set, "allgather", name, error)  # The others submit an allgather here.
        raise
    compare_descriptions(described, "parameters differ between ranks", name, process_set)


def compare_descriptions(
    described: Described, title: str, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[str]:
    """Check that all ranks have equal descriptions of the same names, in any order. Collective.

    Callers that match items over ranks afterwards have to use the returned order, not their own: the order of a `set`,
    a `dict` or a `state_dict` may differ by rank. The returned one is that of the process set's first rank.

    `described` has by name a description and a checksum or 0. `title` is the first line of the MismatchError.
    """
    return expect_equal(allgather_object(described, name, process_set), title, process_set.ranks)


def expect_equal(everyone: list[Described], title: str, numbers: Sequence[int]) -> list[str]:
    """Raise MismatchError unless all descriptions are equal; return the names in the order of the first one.

    `numbers` are the ranks that the descriptions come from.
    """
    lines = find_differences(everyone, numbers)
    if lines:
        more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        raise MismatchError("\n  ".join([title, *lines[:_SHOWN], *more]))
    return list(everyone[0])


def broadcast_arrays(
    arrays: Mapping[str, Any], described: Described, root_rank: int, title: str, process_set: ProcessSet
) -> None:
    """Copy the values of one rank's arrays to the arrays of the same names on every rank. Collective.

    Arrays are contiguous, of any dtype. If names or descriptions differ between ranks, all ranks raise MismatchError,
    whose first line is `title`, before anything is changed.
    """
    order = compare_descriptions(described, title, None, process_set)
    # Sent as bytes, so that any dtype is supported.
    parts = [part for name in order if (part := arrays[name].reshape(-1).view(np.uint8)).size]
    for handle in [broadcast_async_(part, root_rank, None, process_set) for part in parts]:
        handle.wait()


def find_differences(ranks: list[Described], numbers: Sequence[int] | None = None) -> list[str]:
    """Return lines about the names that differ between ranks, in the order of the first rank.

    `numbers` are the ranks that the descriptions come from; by default they are counted from 0.
    """
    numbers = range(len(ranks)) if numbers is None else numbers
    lines = []
    names = dict.fromkeys(name for described in ranks for name in described)
    for name in names:
        values = [described.get(name) for described in ranks]
        if all(value == values[0] for value in values):
            continue
        votes = Counter(values)
        common = max(votes, key=lambda value: (votes[value], value == values[0]))
        others: dict[tuple[str, int] | None, list[int]] = {}
        for rank, value in enumerate(values):
            if value != common:
                others.setdefault(value, []).append(numbers[rank])
        base = numbers[values.index(common)]
        lines += [f"{name!r}: {_describe_difference(who, value, base, common)}" for value, who in others.items()]
    return lines


def _describe_difference(
    who: list[int], value: tuple[str, int] | None, base: int, common: tuple[str, int] | None
) -> str:
    text = f"{readable.format_ranks(who)} {'has' if len(who) == 1 else 'have'}"
    if value is not None and common is not None and value[0] == common[0]:
        return f"{text} other values than rank {base} ({value[0]})"
    mine, theirs = (f"{each[0]}" if each is not None else "no such entry" for each in (value, common))
    return f"{text} {mine}, rank {base} has {theirs}"
