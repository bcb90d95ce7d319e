"""Agreement between ranks on an optimizer's name, options and parameters, for all bindings."""

from __future__ import annotations

import os
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from ..collectives import objects
from ..collectives.process_sets import Numbers, ProcessSet
from ..collectives.reduce_ops import Adasum
from ..session import runtime
from .options import ReductionOptions


class ObjectNumber:
    """Number of one object, which is assigned at its first use, and again in each later world."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._of: Numbers | None = None
        self._value = 0

    def claim_in(self, process_set: ProcessSet) -> int:
        """Return the object's number in a process set, among those of its kind in the order of their first use."""
        if self._of is not process_set.numbers:
            self._of, self._value = process_set.numbers, process_set.numbers.next(self._kind)
        return self._value


def compares_gradients() -> bool:
    """Return whether ranks compare their gradients when a program is traced; False in an elastic job.

    There, a rank that has compiled a step does not trace it again. So it could not take part in the comparison of the
    new ranks of a later world.
    """
    return not os.environ.get("ENGINE_GATE")


def columns_of_absent(names: Sequence[str]) -> int:
    """Return the number of columns of an empty tensor that marks which gradients are absent from a group.

    Ranks compare the shapes of a group's tensors. So a rank whose group lacks other gradients, even of equal shapes,
    causes a mismatch at once.
    """
    return zlib.crc32("\0".join(names).encode()) % (1 << 31) + 1


def unique_names(names: Iterable[str]) -> list[str]:
    """Make names unique: the second `w` becomes `w#1`."""
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
    """Return a suffix for the name of an operation on several named items in this order.

    It is empty if `Pairing` compares the names. Otherwise it is a checksum of them: operations of ranks with other
    names or another order are then never matched with each other.
    """
    return "" if compares_gradients() else f":{zlib.crc32(chr(0).join(names).encode()):08x}"


def places_of(order: Iterable[str], names: Sequence[str]) -> list[int]:
    """Return the indices in `names` of the names of `order`."""
    places = {name: place for place, name in enumerate(names)}
    return [places[name] for name in order]


def in_groups(names: Sequence[str], groups: Iterable[Sequence[int]] | None) -> list[str]:
    """Return for each name a suffix of its description that names its group; empty if it has none.

    A group is named by the first of its names in alphabetical order.
    """
    ends = [""] * len(names)
    for group in groups or ():
        for place in group:
            ends[place] = f" in the group of {min(names[each] for each in group)!r}"
    return ends


class Pairing:
    """Common order of named items on all ranks of a process set.

    The names are compared when they first occur in a world, in any order. If the ranks' own orders differ, as those of
    a `set` or a `dict` may, all ranks use that of the first rank, even if an order changes later. The optimizer's
    options are compared together with the names.
    """

    def __init__(self, options: ReductionOptions) -> None:
        self._options = options
        self._orders: weakref.WeakKeyDictionary[Numbers, dict[frozenset[str], list[str]]] = weakref.WeakKeyDictionary()

    def agree_on_order(self, names: Sequence[str], describe: Callable[[], objects.Described]) -> list[int]:
        """Return the indices of `names` in the common order of all ranks. Collective for new names.

        Names have no duplicates. `describe` returns their descriptions, is called only for new names, and may add
        further names to compare. If names, descriptions or options differ between ranks, all ranks raise MismatchError.
        """
        if not compares_gradients():
            return list(range(len(names)))
        known = self._orders.setdefault(self._options.process_set.numbers, {})
        key = frozenset(names)
        if key not in known:
            known[key] = [name for name in expect_agreement(self._options, describe()) if name in key]
        return places_of(known[key], names)


def claim_name(options: ReductionOptions) -> tuple[int, str]:
    """Return the number of a new optimizer in its process set, and its operations' name prefix without a dot."""
    number = options.process_set.numbers.next("optimizer")
    return number, f"{'change' if options.op == Adasum else 'gradient'}{number or ''}"


def expect_agreement(options: ReductionOptions, parameters: objects.Described) -> list[str]:
    """Compare an optimizer's options and parameters over the ranks of its process set. Collective.

    While a process of an elastic job is in no world, nothing is compared.

    `parameters` has by name a description for messages, as from `objects.describe`, and a number for properties that it
    leaves out. Returns their names in the same order on all ranks. If options or parameters differ, all ranks raise
    MismatchError.
    """
    process_set = options.process_set
    if runtime.is_waiting():
        return list(parameters)
    told = {"options": (str(options), 0)}
    objects.compare_descriptions(told, "DistributedOptimizer: the ranks give different options", None, process_set)
    message = "DistributedOptimizer: the ranks' optimizers have different parameters"
    return objects.compare_descriptions(parameters, message, None, process_set)
