"""Grouped collectives: several tensors, of any dtypes, in one request that succeeds or fails as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .adapters import adapter_of
from .collectives import number_of, share_of
from .compression import resolve
from .failures import announce_failure
from .handles import Handle
from .process_sets import ProcessSet, global_process_set
from .reduce_ops import Average


class GatherHandle(Handle):
    """Handle of an allgather of several tensors."""

    __slots__ = ()

    @property
    def rows(self) -> Any:
        """Numbers of rows from each rank, for each tensor; valid after `wait`."""
        return [rows for _, rows, _ in self._native.gathered_group]


def grouped_allreduce_async_(
    tensors: Sequence[Any],
    op: int | None = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = None,
) -> Handle:
    """Start `grouped_allreduce_`; see there. The tensors must not be accessed until `synchronize` returns."""
    return _reduce_in_place(
        tensors, op, name, prescale_factor, postscale_factor, process_set, compression, blocking=False
    )


def grouped_allreduce_async(
    tensors: Sequence[Any],
    op: int | None = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = None,
) -> Handle:
    """Start `grouped_allreduce`; see there. The tensors must not be written to until `synchronize` returns."""
    return _reduce(
        "allreduce", tensors, op, name, prescale_factor, postscale_factor, process_set, compression, blocking=False
    )


def grouped_allreduce(
    tensors: Sequence[Any],
    op: int | None = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = None,
) -> list[Any]:
    """Combine several tensors over all ranks in one request. Collective.

    They are reduced together once every rank has submitted all of them, or refused together. This is much cheaper than
    one call for each.

    Parameters
    ----------
    tensors : sequence of array or tensor
        Same as for `allreduce`, of any dtypes; the same number on all ranks, in the same order.
    op, name, prescale_factor, postscale_factor, compression : optional
        Same as for `allreduce`.

    Returns
    -------
    list of array or tensor

    Raises
    ------
    ValueError
        `tensors` is empty.
    EngineError
        Same as for `allreduce`; it concerns all of the tensors.
    """
    return _wait_for_list(
        _reduce(
            "allreduce", tensors, op, name, prescale_factor, postscale_factor, process_set, compression, blocking=True
        )
    )


def grouped_allreduce_(
    tensors: Sequence[Any],
    op: int | None = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = None,
) -> list[Any]:
    """Combine several tensors over all ranks in place, like `grouped_allreduce`. Returns the tensors."""
    return _wait_for_list(
        _reduce_in_place(tensors, op, name, prescale_factor, postscale_factor, process_set, compression, blocking=True)
    )


def grouped_allgather_async(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> GatherHandle:
    """Start `grouped_allgather`; see there. The tensors must not be written to until `synchronize` returns."""
    return _submit_allgather(tensors, name, process_set, blocking=False)


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Concatenate several tensors of all ranks along their first dimensions, in one request. Collective.

    Parameters
    ----------
    tensors : sequence of array or tensor
        Same as for `allgather`, of any dtypes; the same number on all ranks, in the same order. The number of rows may
        differ by rank and by tensor.
    name : str, optional
        Same as for `allreduce`.

    Returns
    -------
    list of array or tensor
        Result of `allgather` for each tensor.

    Raises
    ------
    ValueError
        `tensors` is empty.
    EngineError
        Same as for `allreduce`; it concerns all of the tensors.
    """
    return _wait_for_list(_submit_allgather(tensors, name, process_set, blocking=True))


def grouped_reducescatter_async(
    tensors: Sequence[Any],
    op: int | None = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = None,
) -> Handle:
    """Start `grouped_reducescatter`; see there. The tensors must not be written to until `synchronize` returns."""
    return _reduce(
        "reducescatter", tensors, op, name, prescale_factor, postscale_factor, process_set, compression, blocking=False
    )


def grouped_reducescatter(
    tensors: Sequence[Any],
    op: int | None = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = None,
) -> list[Any]:
    """Combine several tensors over all ranks, and return this rank's rows of each, in one request. Collective.

    Parameters
    ----------
    tensors : sequence of array or tensor
        Same as for `reducescatter`, of any dtypes; the same number on all ranks, in the same order.
    op, name, prescale_factor, postscale_factor, compression : optional
        Same as for `allreduce`.

    Returns
    -------
    list of array or tensor
        Result of `reducescatter` for each tensor: its rows are divided in rank order.

    Raises
    ------
    ValueError
        `tensors` is empty.
    EngineError
        Same as for `allreduce`; it concerns all of the tensors.
    """
    handle = _reduce(
        "reducescatter", tensors, op, name, prescale_factor, postscale_factor, process_set, compression, blocking=True
    )
    return _wait_for_list(handle)


def _wait_for_list(handle: Handle) -> list[Any]:
    results = handle.wait()
    assert isinstance(results, list)
    return results


def _reduce(
    kind: str,
    tensors: Sequence[Any],
    op: int | None,
    name: str | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    compression: Any,
    blocking: bool,
) -> Handle:
    """Start an allreduce or a reduce-scatter, which `kind` names."""
    try:
        wire, own = resolve(compression, op)
        pairs = [(tensor, None) if own is None else own.compress(tensor) for tensor in tensors]
        sent = [tensor for tensor, _ in pairs]
        adapters = [adapter_of(tensor) for tensor in sent]
        sources = [adapter.as_input(tensor) for adapter, tensor in zip(adapters, sent, strict=True)]
        engine = process_set.engine
        if kind == "allreduce":
            models, reduce = sources, engine.allreduce_group
        else:
            models, reduce = [share_of(each, engine.rank, engine.size) for each in sources], engine.reducescatter_group
        outputs = [adapter.make_empty(model) for adapter, model in zip(adapters, models, strict=True)]
        native = reduce(sources, outputs, name, number_of(op), prescale, postscale, blocking, wire)
    except Exception as error:
        announce_failure(process_set, kind, name, error)
        raise

    def fetch_results(outputs: list[Any]) -> list[Any]:
        return [
            adapter.as_framework_tensor(tensor, output)
            for adapter, tensor, output in zip(adapters, sent, outputs, strict=True)
        ]

    handle = Handle(native, outputs, fetch_results)
    if own is None:
        return handle
    return handle.then(
        lambda results: [own.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)]
    )


def _reduce_in_place(
    tensors: Sequence[Any],
    op: int | None,
    name: str | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    compression: Any,
    blocking: bool,
) -> Handle:
    native = None
    try:
        adapters = [adapter_of(tensor) for tensor in tensors]
        targets = [adapter.as_target(tensor) for adapter, tensor in zip(adapters, tensors, strict=True)]
        wire, own = resolve(compression, op)
        if own is None:
            native = process_set.engine.allreduce_group(
                targets, targets, name, number_of(op), prescale, postscale, blocking, wire
            )
    except Exception as error:
        announce_failure(process_set, "allreduce", name, error)
        raise

    def store(results: list[Any]) -> list[Any]:
        for adapter, tensor, result in zip(adapters, tensors, results, strict=True):
            if result is not tensor:
                adapter.store(tensor, result)
        return list(tensors)

    if native is None:
        return _reduce("allreduce", tensors, op, name, prescale, postscale, process_set, compression, blocking).then(
            store
        )
    return Handle(native, targets, store)


def _submit_allgather(
    tensors: Sequence[Any], name: str | None, process_set: ProcessSet, blocking: bool
) -> GatherHandle:
    try:
        adapters = [adapter_of(tensor) for tensor in tensors]
        sources = [adapter.as_rows(tensor) for adapter, tensor in zip(adapters, tensors, strict=True)]
        room = adapters[0].make_allocator(tensors[0]) if adapters else None
        native = process_set.engine.allgather_group(sources, name, blocking, None, room)
    except Exception as error:
        announce_failure(process_set, "allgather", name, error)
        raise

    def fetch_results(_: Any) -> list[Any]:
        parts = native.gathered_group
        return [
            adapter.make_gathered(tensor, data, sum(rows))
            for adapter, tensor, (data, rows, _) in zip(adapters, tensors, parts, strict=True)
        ]

    return GatherHandle(native, None, fetch_results)
