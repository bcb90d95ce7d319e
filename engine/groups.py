"""Several tensors in one request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine import runtime
from engine.adapters import adapter_of
from engine.collectives import number_of
from engine.compression import resolve
from engine.errors import EngineError
from engine.native import core
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

    def then(self, fetch: Callable[[list[Any]], list[Any]]) -> Group:
        """The same operations, whose results are what `fetch` makes of this group's."""
        return Group(self._natives, [], lambda _: fetch(self.wait()))


def grouped_allreduce_async_(
    tensors: Sequence[Any],
    op: int | None = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Any = None,
) -> Group:
    """Start `grouped_allreduce_`; see there. The tensors must be left alone until `synchronize` returns."""
    return _reduce_group_in_place(tensors, op, name, (prescale_factor, postscale_factor), compression, blocking=False)


def grouped_allreduce_async(
    tensors: Sequence[Any],
    op: int | None = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Any = None,
) -> Group:
    """Start `grouped_allreduce`; see there. The tensors must not be written to until `synchronize` returns."""
    return _reduce_group(tensors, op, name, (prescale_factor, postscale_factor), compression, blocking=False)


def grouped_allreduce(
    tensors: Sequence[Any],
    op: int | None = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Any = None,
) -> list[Any]:
    """Combine several tensors over all ranks in one request. Collective.

    Tensors of one dtype are one operation: reduced together once every rank has brought all of them, or refused
    together. Much cheaper than as many calls.

    Parameters
    ----------
    tensors : sequence of array or tensor
        As for `allreduce`; equally many on all ranks, in one order.
    op, name, prescale_factor, postscale_factor, compression : optional
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
    return _reduce_group(tensors, op, name, (prescale_factor, postscale_factor), compression, blocking=True).wait()


def grouped_allreduce_(
    tensors: Sequence[Any],
    op: int | None = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Any = None,
) -> list[Any]:
    """As `grouped_allreduce`, in place. Returns the tensors."""
    return _reduce_group_in_place(
        tensors, op, name, (prescale_factor, postscale_factor), compression, blocking=True
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
    wire: str | None,
    blocking: bool,
) -> list[core.Handle]:
    if not sources:
        raise ValueError("a group has at least one tensor")
    groups = _by_dtype(sources)
    engine = runtime.engine()
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
            wire,
        )
        for dtype, members in groups.items()
    ]


def _reduce_group(
    tensors: Sequence[Any],
    op: int | None,
    name: str | None,
    scales: tuple[float, float],
    compression: Any,
    blocking: bool,
) -> Group:
    wire, own = resolve(compression)
    pairs = [(tensor, None) if own is None else own.compress(tensor) for tensor in tensors]
    sent = [tensor for tensor, _ in pairs]
    adapters = [adapter_of(tensor) for tensor in sent]
    sources = [adapter.input(tensor) for adapter, tensor in zip(adapters, sent, strict=True)]
    outputs = [adapter.empty(source) for adapter, source in zip(adapters, sources, strict=True)]
    natives = _start_group(sources, outputs, op, name, scales, wire, blocking)

    def fetch(outputs: list[Any]) -> list[Any]:
        return [adapter.result(tensor, output) for adapter, tensor, output in zip(adapters, sent, outputs, strict=True)]

    group = Group(natives, outputs, fetch)
    if own is None:
        return group
    return group.then(
        lambda results: [own.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)]
    )


def _reduce_group_in_place(
    tensors: Sequence[Any],
    op: int | None,
    name: str | None,
    scales: tuple[float, float],
    compression: Any,
    blocking: bool,
) -> Group:
    adapters = [adapter_of(tensor) for tensor in tensors]
    targets = [adapter.target(tensor) for adapter, tensor in zip(adapters, tensors, strict=True)]

    def store(results: list[Any]) -> list[Any]:
        for adapter, tensor, result in zip(adapters, tensors, results, strict=True):
            if result is not tensor:
                adapter.store(tensor, result)
        return list(tensors)

    wire, own = resolve(compression)
    if own is not None:
        return _reduce_group(tensors, op, name, scales, compression, blocking).then(store)
    return Group(_start_group(targets, targets, op, name, scales, wire, blocking), targets, store)
