"""Choose what a job is scored by, from what it does before the first trial.

Steps of a `DistributedOptimizer` over all ranks, if there are any: of several optimizers those of the rarest, so that a
whole alternation is one step. Else the traffic: the time from one end of a tensor to its next, if tensors recur in
step; if they do not, the busy time per byte.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..native import core
from .job import UNNAMED
from .knobs import on_gpus
from .steps import STEPPED, TRAFFIC, Mark, Score, Steps

ACTIVE = 25  # looks with tensors and without the end of a step after which the traffic is scored
OFTEN = 8  # times that a tensor has been reduced before it counts as one that recurs
SHARE = 0.1  # least share of the bytes that the rarest recurring tensors have together
PERIODS = 40  # periods by which regularity is judged
PAUSES = 0.05  # share of the periods that may have any length: pauses
UNEVEN = 1.3  # largest mean of the other periods over their median
SHORTEST = 0.005  # least seconds of a sample: it takes several periods where they are shorter
REMEMBERED = 32  # marks that are remembered, for each step that is needed


def rarest(marks: Sequence[Mark], needed: int) -> int | None:
    """The optimizer whose steps are the longest, once one has had `needed`; None: not yet."""
    places: dict[int, list[int]] = {}
    for place, mark in enumerate(marks):
        places.setdefault(mark.source, []).append(place)
    if max(map(len, places.values()), default=0) < needed:
        return None
    going = {
        source: (marks[at[-1]].time - marks[at[0]].time) / (len(at) - 1)
        for source, at in places.items()
        if len(at) > 1 and len(marks) - 1 - at[-1] <= 2 * (at[-1] - at[-2])
    }
    return max(going, key=lambda source: going[source], default=None)


def anchor(definitions: Iterable[Mapping[str, Any]]) -> str | None:
    """The tensor whose ends are those of periods: one of the rarest that have their share of the bytes.

    So neither a tensor that passes more than once in a period is taken, nor one of a validation now and then.

    Parameters
    ----------
    definitions : iterable of dict
        As `core.Engine.definitions` gives them.

    Returns
    -------
    str or None
        None: what recurs has no names of its own, or nothing recurs.
    """
    often = sorted(  # what has no bytes of its own in a definition counts for little
        (each["times"], each["name"], each["times"] * max(each["bytes"], 1))
        for each in definitions
        if each["times"] >= OFTEN
    )
    named = [each for each in often if not UNNAMED.fullmatch(each[1])]
    total, passed = sum(nbytes for *_, nbytes in often), 0
    if sum(nbytes for *_, nbytes in named) < (1.0 - SHARE) * total:
        return None
    for _, name, nbytes in named:
        passed += nbytes
        if passed >= SHARE * total:
            return str(name)
    return None


def regular(gaps: Sequence[float]) -> bool:
    """Whether gaps are those of one period after the other, and not of several tensors that share a name."""
    usual = sorted(gaps)[: len(gaps) - math.floor(PAUSES * len(gaps))]
    return statistics.mean(usual) <= UNEVEN * statistics.median(gaps)


class Listener:
    """Listens to a job until it is known what to score it by.

    Parameters
    ----------
    engine : core.Engine
        The engine of rank 0.
    steps : Steps
    needed : int
        Fewest steps of one optimizer, or periods, to listen to.
    """

    def __init__(self, engine: core.Engine, steps: Steps, needed: int) -> None:
        self._engine = engine
        self._steps = steps
        self._needed = max(needed, STEPPED)
        self._heard: list[Mark] = []
        self._tensors = engine.counters()["tensors"]
        self._active = 0  # looks in a row with tensors and without the end of a step
        self._began = self._window = 0  # tensors counted before those looks, and in the last one
        self._anchor: str | None = None
        self._passed = 0  # ends of the anchor tensor before marks were made of them
        self._ends: list[int] = []
        self._entries: int | None = None  # counted when the first step was heard, or the anchor chosen
        self._before: list[int] = []  # sources of the steps that were heard by then

    def steps(self, score: Score) -> int:
        """How many steps, or periods, there have been."""
        if score.source == TRAFFIC:
            return self._passed + len(self._ends)
        return sum(mark.source == score.source for mark in self._heard)

    def entries(self, score: Score) -> float:
        """Entries of a step, or a period, in the mean; 0 if that is not known."""
        if self._entries is None:
            return 0.0
        heard = len(self._ends) if score.source == TRAFFIC else self.steps(score) - self._before.count(score.source)
        return max(0, self._engine.counters()["entries"] - self._entries) / max(heard, 1)

    @property
    def idle(self) -> bool:
        """Whether there is nothing yet to score by."""
        return not self._heard and self._anchor is None

    def look(self) -> Score | None:
        """Look at new marks, a few times a second. Returns what to score by, once that is known."""
        marks = self._steps.marks()
        stepped = [mark for mark in marks if mark.source != TRAFFIC]
        self._heard = (self._heard + stepped)[-REMEMBERED * self._needed :]
        if stepped and not self._before:
            self._entries, self._before = self._engine.counters()["entries"], [mark.source for mark in stepped]
        source = rarest(self._heard, self._needed)
        if source is not None:
            self._engine.mark_traffic()
            return Score(source=source)
        before, self._tensors = self._tensors, self._engine.counters()["tensors"]
        if stepped:
            self._active, self._anchor = 0, None
            self._ends.clear()
            self._engine.mark_traffic()
            return None
        if self._active == 0:
            self._began = before
        self._active += before != self._tensors
        self._ends += [mark.time for mark in marks]
        if self._anchor is not None:
            return self._by_periods(self._anchor)
        if self._active < ACTIVE:
            return None
        self._window = max(1, round((self._tensors - self._began) / self._active))
        definitions = self._engine.definitions()
        self._anchor = anchor(definitions)
        self._passed = sum(each["times"] for each in definitions if each["name"] == self._anchor)
        if self._anchor is None:
            return self._by_bytes()
        self._ends.clear()
        self._entries, self._before = self._engine.counters()["entries"], []
        self._engine.mark_traffic(self._anchor)
        return None

    def _by_periods(self, name: str) -> Score | None:
        # A period is a step in all but name: its time is what the user waits for, computing and overlap included. Busy
        # time per byte also counts what is hidden behind computing, so it is second best.
        gaps = [(end - begin) / 1e9 for begin, end in zip(self._ends, self._ends[1:], strict=False)]
        if len(gaps) < max(PERIODS, self._needed):
            return self._by_bytes() if self._active > 8 * ACTIVE else None
        if not regular(gaps):
            return self._by_bytes()
        every = max(1, math.ceil(SHORTEST / statistics.median(gaps)))
        self._engine.mark_traffic(name, every)
        return Score(unit="seconds per period", subject=f"a period of {name!r}", source=TRAFFIC, every=every)

    def _by_bytes(self) -> Score | None:
        if on_gpus(self._engine):
            # When the GPU is done with a tensor the traffic does not tell: steps or periods have to. It listens anew.
            self._active, self._anchor = 0, None
            self._ends.clear()
            self._engine.mark_traffic()
            return None
        self._engine.mark_traffic(window=self._window)
        return Score(unit="busy seconds per GiB", subject="a byte", spent="busy time", source=TRAFFIC, busy=True)
