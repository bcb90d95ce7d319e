"""What the optimizers of all bindings agree on between ranks: their names, their options, their parameters."""

from __future__ import annotations

import itertools
import os
import weakref
import zlib
from collections.abc import Iterator, Sequence

from .. import objects
from ..process_sets import ProcessSet
from ..types import Adasum
from .options import Options

# How many of each kind each process set has had: its ranks have made equally many of them, and perhaps others besides.
_counts: weakref.WeakKeyDictionary[ProcessSet, dict[str, Iterator[int]]] = weakref.WeakKeyDictionary()


def next_number(kind: str, process_set: ProcessSet) -> int:
    """Number the things of one kind of which a process set's ranks make equally many, whatever framework they are of.

    Two frameworks in one process count together, so that they cannot give one name to two operations.
    """
    return next(_counts.setdefault(process_set, {}).setdefault(kind, itertools.count()))


def compares() -> bool:
    """Whether ranks compare what they are about to reduce when a program is traced. Not in an elastic job: who has
    compiled a step never traces it again, and would not compare it with the newcomers of a later world, which do."""
    return not os.environ.get("ENGINE_GATE")


def columns_of_absent(names: Sequence[str]) -> int:
    """The columns of an empty tensor that goes with a group from which these gradients are absent.

    Ranks compare the shapes of a group's tensors. So groups that lack other gradients on another rank, of equal shapes
    perhaps, are a mismatch at once.
    """
    return zlib.crc32("\0".join(names).encode()) % (1 << 31) + 1


def claim_name(options: Options) -> tuple[int, str]:
    """The number of a new optimizer in its process set, and the prefix of its operations' names, without a dot."""
    number = next_number("optimizer", options.process_set)
    return number, f"{'change' if options.op == Adasum else 'gradient'}{number or ''}"


def expect_agreement(options: Options, parameters: objects.Described) -> None:
    """Compare an optimizer's options and parameters over the ranks of its process set. Collective.

    Parameters
    ----------
    options : Options
    parameters : dict of str to (str, int)
        By the parameter's name: a description for messages, as `objects.describe` makes it, and a number for what the
        description leaves out.

    Raises
    ------
    MismatchError
        They differ; all ranks raise it.
    """
    process_set = options.process_set
    told = {"options": (str(options), 0)}
    objects.compare(told, "DistributedOptimizer: the ranks give different options", None, process_set)
    message = "DistributedOptimizer: the ranks' optimizers have different parameters"
    objects.compare(parameters, message, None, process_set)
