"""Several tensors in one request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.adapters import adapter_of
from engine.collectives import number_of
from engine.errors import EngineError
from engine.native import core
from engine.process_sets import ProcessSet, global_process_set
from engine.types import Average


class Group:
    """Several operations that were started together; `poll` and `synchronize` take it as they take a `Handle`."""

    __slots__ = ("_fetch", "_natives", "_results")

    def __init__(self, natives: list[core.Handle], results: list[Any], fetch: Callable[[list[Any]], list[Any]]) -> None:
        self._natives = natives
        self._results = results
        self._fetch: Callable[[list[Any]], list[Any]] | None = fetch

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once. Never blocks; raises nothing."""
        return all(native.done for native in self._natives)

    def wait(self) -> list[Any]:
        """The results, when all are there; may be called again. Raises what went wrong, the first of it."""
        error = None
        for native in self._natives:
            try:
                native.wait()
            except EngineError as cause:
                error = error or cause
        if error is not None:
            raise error
        if self._fetch is not None:
            self._results = self._fetch(self._results)
            self._fetch = None
        return self._results


def grouped_allreduce_async_(
    tensors: Sequence[Any],
    op: int | None = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Group:
    """Start `grouped_allreduce_`; see there. The tensors must be left alone until `synchronize` returns."""
    return _reduce_group_in_place(tensors, op, name, prescale_factor, postscale_factor, process_set, blocking=False)


def grouped_allreduce_async(
    tensors: Sequence[Any],
    op: int | None = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Group:
    """Start `grouped_allreduce`; see there. The tensors must not be written to until `synchronize` returns."""
    return _reduce_group(tensors, op, name, prescale_factor, postscale_factor, process_set, blocking=False)


def grouped_allreduce(
    tensors: Sequence[Any],
    op: int | None = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Combine several tensors over all ranks in one request. Collective.

    Tensors of one dtype are one operation: reduced together once every rank has brought all of them, or refused
    together. Much cheaper than as many calls.

    Parameters
    ----------
    tensors : sequence of array or tensor
        As for `allreduce`; equally many on all ranks, in one order.
    op, name, prescale_factor, postscale_factor : optional
        As for `allreduce`.

    Returns
    -------
    list of array or tensor

    Raises
    ------
    ValueError
        There is no tensor.
    EngineError
        As for `allreduce`; a `MismatchError` concerns all tensors of a dtype.
    """
    return _reduce_group(tensors, op, name, prescale_factor, postscale_factor, process_set, blocking=True).wait()


def grouped_allreduce_(
    tensors: Sequence[Any],
    op: int | None = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """As `grouped_allreduce`, in place. Returns the tensors."""
    return _reduce_group_in_place(
        tensors, op, name, prescale_factor, postscale_factor, process_set, blocking=True
    ).wait()


def _by_dtype(sources: list[Any]) -> dict[Any, list[int]]:
    """Which tensors are of which dtype, in the order of their first."""
    groups: dict[Any, list[int]] = {}
    for index, source in enumerate(sources):
        groups.setdefault(source.dtype, []).append(index)
    return groups


def _start_group(
    sources: list[Any],
    outputs: list[Any],
    op: int | None,
    name: str | None,
    scales: tuple[float, float],
    process_set: ProcessSet,
    blocking: bool,
) -> list[core.Handle]:
    if not sources:
        raise ValueError("a group has at least one tensor")
    groups = _by_dtype(sources)
    engine = process_set.engine
    if len(groups) > 1:
        core.expect_tensors(sources)  # All are refused before any is brought.
    return [
        engine.allreduce_group(
            [sources[index] for index in members],
            [outputs[index] for index in members],
            name if name is None or len(groups) == 1 else f"{name}.{dtype}",
            number_of(op),
            *scales,
            blocking and len(groups) == 1,
        )
        for dtype, members in groups.items()
    ]


def _reduce_group(
    tensors: Sequence[Any],
    op: int | None,
    name: str | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    blocking: bool,
) -> Group:
    adapters = [adapter_of(tensor) for tensor in tensors]
    sources = [adapter.input(tensor) for adapter, tensor in zip(adapters, tensors, strict=True)]
    outputs = [adapter.empty(source) for adapter, source in zip(adapters, sources, strict=True)]
    natives = _start_group(sources, outputs, op, name, (prescale, postscale), process_set, blocking)

    def fetch(outputs: list[Any]) -> list[Any]:
        return [
            adapter.result(tensor, output) for adapter, tensor, output in zip(adapters, tensors, outputs, strict=True)
        ]

    return Group(natives, outputs, fetch)


def _reduce_group_in_place(
    tensors: Sequence[Any],
    op: int | None,
    name: str | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    blocking: bool,
) -> Group:
    adapters = [adapter_of(tensor) for tensor in tensors]
    targets = [adapter.target(tensor) for adapter, tensor in zip(adapters, tensors, strict=True)]
    natives = _start_group(targets, targets, op, name, (prescale, postscale), process_set, blocking)

    def fetch(targets: list[Any]) -> list[Any]:
        for adapter, tensor, target in zip(adapters, tensors, targets, strict=True):
            if target is not tensor:
                adapter.store(tensor, target)
        return list(tensors)

    return Group(natives, targets, fetch)
