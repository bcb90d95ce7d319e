"""Reduction of gradients that Python compresses, after a pass, by the collectives of a `Scheme`.

The generators of all gradients advance together. The tensors that they yield in one round are one grouped allreduce.
So the number of collectives is the number of rounds, independently of the number of parameters.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..collectives import collectives, groups, objects
from ..collectives.compression import MARKERS, Scheme, resolve
from ..collectives.reduce_ops import Average, Max, Min, Op, Product, Sum
from ..session import topology
from .options import ReductionOptions

if TYPE_CHECKING:
    from .reducer import Reducer

IDENTITY = {Average: 0.0, Sum: 0.0, Min: math.inf, Max: -math.inf, Product: 1.0}


class Compressing(Scheme):
    """Scheme of one round that applies a compressor."""

    def __init__(self, compressor: Any) -> None:
        self._compressor = compressor

    def reduce(self, name: str, gradient: Any) -> Generator[Any, Any, Any]:
        sent, context = self._compressor.compress(gradient)
        reduced = yield sent
        return self._compressor.decompress(reduced, context)


def scheme_of(compression: Any, op: Op) -> tuple[str | None, Scheme | None]:
    """Return the dtype to which the engine casts, and the scheme that Python applies; each may be None."""
    if isinstance(compression, Scheme):
        return None, compression
    wire, own = resolve(compression, op)
    return wire, None if own is None else Compressing(own)


class Rounds:
    """Gradients of one optimizer that a scheme reduces.

    A rank outside of the options' process set gets none. `wire` is the dtype to which the engine casts tensors while
    they are sent.
    """

    def __init__(self, reducer: Reducer, scheme: Scheme | None, options: ReductionOptions, wire: str | None) -> None:
        self._reducer = reducer  # reducer of the optimizer, with the framework's methods to fill gradients
        self._scheme = scheme
        self._settings = options.prescale, options.postscale, options.process_set, MARKERS[wire]
        self._process_set = options.process_set
        self._op = options.op
        self._parameters: dict[int, tuple[str, Any]] = {}
        self.late = False  # whether gradients came after the end of the backward pass, which ranks compare

    def accepts_parameter(self, name: str, parameter: Any) -> bool:
        """Return whether the scheme reduces the gradients of a parameter."""
        return (
            self._scheme is not None and self._reducer.is_floating(parameter) and self._scheme.accepts(name, parameter)
        )

    def __contains__(self, index: int) -> bool:
        return index in self._parameters

    def add(self, index: int, name: str, parameter: Any) -> None:
        """Add a parameter, in the same order on every rank. `index`: its index in the reducer."""
        self._parameters[index] = name, parameter

    def share_state(self, root: int) -> None:
        """Broadcast the state of the scheme from one rank of the process set. Collective.

        `root`: world rank of the sender; if it is not in the set, the first rank of the set is used.
        """
        if self._scheme is None or not self._parameters:
            return
        first = next(iter(self._parameters.values()))[0]
        root = root if root in self._process_set.ranks else self._process_set.ranks[0]
        state = objects.broadcast_object(self._scheme.state_dict(), root, f"{first}.state", self._process_set)
        if topology.rank() != root:
            self._scheme.load_state_dict(state)

    def run(self, missing: Sequence[int]) -> None:
        """Reduce the gradients of a pass. Collective. `missing`: indices of those that this rank does not have.

        A gradient that only some ranks have is reduced; the other ranks contribute nothing and get the result.
        """
        if self._scheme is None or not self._parameters:
            return
        first = next(iter(self._parameters.values()))[0]
        absent = set(missing)
        mine = np.array([index not in absent for index in self._parameters] + [True] * self.late, np.uint8)
        present = self._exchange_presence(mine, first)
        running = []
        for index, there in zip(self._parameters, present, strict=False):
            name, parameter = self._parameters[index]
            if there:
                if parameter.grad is None or index in absent:
                    parameter.grad = self._reducer.full_like(parameter, IDENTITY[self._op])
                running.append((name, parameter.grad, self._scheme.reduce(name, parameter.grad)))
        with self._reducer.no_gradients():
            self._in_step(running, first)

    def _exchange_presence(self, mine: NDArray[np.uint8], first: str) -> NDArray[np.uint8]:
        """Return for each gradient whether some rank has it. Collective.

        Raises MismatchError if the numbers of rounds differ between ranks, for example because only one has loaded a
        checkpoint.
        """
        rounds = self._scheme.rounds() if self._scheme is not None else {}
        counts = {name: rounds.get(name, 0) for name, _ in self._parameters.values()}
        own = np.frombuffer(zlib.crc32(repr(counts).encode()).to_bytes(4, "little"), np.uint8)
        told = collectives.allreduce(
            np.concatenate((mine, own, ~own)), Max, f"{first}.present", process_set=self._process_set
        )
        present, largest, least = np.split(told, [len(mine), len(mine) + len(own)])
        if (largest != ~least).any():
            described = {name: (f"{count} reductions", 0) for name, count in counts.items()}
            title = (
                f"what {type(self._scheme).__name__} remembers differs between ranks: load its state_dict() on all "
                "ranks, or on none"
            )
            objects.compare_descriptions(described, title, f"{first}.rounds", self._process_set)
        return present

    def _in_step(self, running: list[tuple[str, Any, Generator[Any, Any, Any]]], first: str) -> None:
        """Run all generators to their ends, and store their results in the gradients."""
        received: list[Any] = [None] * len(running)
        for number in itertools.count():
            going, sent = [], []
            for (name, gradient, generator), tensor in zip(running, received, strict=True):
                try:
                    sent.append(generator.send(tensor))
                    going.append((name, gradient, generator))
                except StopIteration as end:
                    self._put(name, gradient, end.value)
            if not going:
                return
            running = going
            received = groups.grouped_allreduce(sent, self._op, f"{first}.round{number}", *self._settings)

    def _put(self, name: str, gradient: Any, result: Any) -> None:
        if not isinstance(result, self._reducer.kind) or result.shape != gradient.shape:
            shape = (
                f"shape {list(result.shape)}" if isinstance(result, self._reducer.kind) else type(result).__qualname__
            )
            raise TypeError(f"the compression of {name!r} made {shape} of a gradient of shape {list(gradient.shape)}")
        if result is not gradient:
            self._reducer.store(gradient, result)
