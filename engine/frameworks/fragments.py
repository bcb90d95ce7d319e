"""Division of a model into fragments, whose parameters are synchronised at different steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Fragment:
    """Part of a model whose parameters are synchronised in the same step."""

    names: tuple[str, ...]  # names of its parameters, ascending
    offset: int  # step of the first synchronisation, modulo the steps between two of them

    def is_due(self, steps: int, every: int) -> bool:
        """Return whether the fragment is synchronised after so many inner steps."""
        return steps % every == self.offset


def split_parameters(sizes: Mapping[str, int], count: int, every: int) -> list[Fragment]:
    """Divide parameters into fragments of about equal size, due at even distances.

    The largest parameter that is left goes to the smallest fragment. The result depends on names and sizes alone, so it
    is the same on all ranks and in every world of an elastic job. `sizes` has numbers of elements, and `count` is from
    1 to the number of parameters. There are `every` inner steps between two synchronisations of a fragment.
    """
    parts: list[list[str]] = [[] for _ in range(count)]
    filled = [0] * count
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        # Of equally full fragments, the one with fewer parameters: so none stays empty.
        least = min(range(count), key=lambda part: (filled[part], len(parts[part]), part))
        parts[least].append(name)
        filled[least] += sizes[name]
    return [Fragment(tuple(sorted(part)), number * every // count) for number, part in enumerate(parts)]
