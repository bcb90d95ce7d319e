"""What the optimizers of all bindings agree on between ranks: their names, their options, their parameters."""

from __future__ import annotations

import os
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from .. import objects, runtime
from ..process_sets import Numbers, ProcessSet
from ..types import Adasum
from .options import Options


def next_number(kind: str, process_set: ProcessSet) -> int:
    """Number the things of one kind of which a process set's ranks make equally many, whatever framework they are of.

    Two frameworks in one process count together, so that they cannot give one name to two operations. In each world of
    an elastic job they count anew: its newcomers have seen none of the worlds before.
    """
    return process_set.numbers.next(kind)


class Number:
    """The number of one thing: given when it is first asked for, and given anew in each world that comes after."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._of: Numbers | None = None
        self._value = 0

    def among(self, process_set: ProcessSet) -> int:
        """The number among the things of its kind that the set's ranks have, numbered as they are first used."""
        if self._of is not process_set.numbers:
            self._of, self._value = process_set.numbers, process_set.numbers.next(self._kind)
        return self._value


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


def unique_names(names: Iterable[str]) -> list[str]:
    """Names of which each is there once: the second `w` becomes `w#1`."""
    counts: Counter[str] = Counter()
    found: dict[str, None] = {}
    for name in names:
        own = name
        while own in found:
            counts[name] += 1
            own = f"{name}#{counts[name]}"
        found[own] = None
    return list(found)


def order_suffix(names: Sequence[str]) -> str:
    """The end of the name of one operation on several named things, in this order.

    It is empty where `Pairing` has compared them. Elsewhere the operations of ranks with another order or other names
    do not meet, so that none of these is combined with another one.
    """
    return "" if compares() else f":{zlib.crc32(chr(0).join(names).encode()):08x}"


def places_of(order: Iterable[str], names: Sequence[str]) -> list[int]:
    """Places among `names` of the same names in an order."""
    places = {name: place for place, name in enumerate(names)}
    return [places[name] for name in order]


def in_groups(names: Sequence[str], groups: Iterable[Sequence[int]] | None) -> list[str]:
    """For each name the end of a description that tells its group, by the first of its names; empty without one."""
    ends = [""] * len(names)
    for group in groups or ():
        for place in group:
            ends[place] = f" in the group of {min(names[each] for each in group)!r}"
    return ends


class Pairing:
    """The order in which the ranks of a process set go through things that have names.

    They are compared when these names come for the first time in a world, in whatever order. Ranks whose own orders
    differ, as those of a `set` or a `dict` may, all take that of the first rank, also where an order changes later.

    Parameters
    ----------
    options : Options
        Options of the optimizer, which are compared with the names.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._orders: weakref.WeakKeyDictionary[Numbers, dict[frozenset[str], list[str]]] = weakref.WeakKeyDictionary()

    def order(self, names: Sequence[str], describe: Callable[[], objects.Described]) -> list[int]:
        """Places among `names` in the order of all ranks. Collective for names that are new.

        Parameters
        ----------
        names : sequence of str
            All different.
        describe : callable
            Describes each of them, called only for names that are new. What else it describes is compared with them.

        Raises
        ------
        MismatchError
            Names, descriptions or options differ between ranks; all ranks raise it.
        """
        if not compares():
            return list(range(len(names)))
        known = self._orders.setdefault(self._options.process_set.numbers, {})
        key = frozenset(names)
        if key not in known:
            known[key] = [name for name in expect_agreement(self._options, describe()) if name in key]
        return places_of(known[key], names)


def claim_name(options: Options) -> tuple[int, str]:
    """The number of a new optimizer in its process set, and the prefix of its operations' names, without a dot."""
    number = next_number("optimizer", options.process_set)
    return number, f"{'change' if options.op == Adasum else 'gradient'}{number or ''}"


def expect_agreement(options: Options, parameters: objects.Described) -> list[str]:
    """Compare an optimizer's options and parameters over the ranks of its process set. Collective.

    Before the first world of an elastic job nothing is compared.

    Parameters
    ----------
    options : Options
    parameters : dict of str to (str, int)
        By the parameter's name: a description for messages, as `objects.describe` makes it, and a number for what the
        description leaves out.

    Returns
    -------
    list of str
        The parameters' names in one order on all ranks, as `objects.compare` gives it.

    Raises
    ------
    MismatchError
        They differ; all ranks raise it.
    """
    process_set = options.process_set
    if runtime.is_waiting():
        return list(parameters)
    told = {"options": (str(options), 0)}
    objects.compare(told, "DistributedOptimizer: the ranks give different options", None, process_set)
    message = "DistributedOptimizer: the ranks' optimizers have different parameters"
    return objects.compare(parameters, message, None, process_set)
