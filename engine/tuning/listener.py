"""Choice of the score of a job, from its activity before the first trial.

The score is the time of a step of a `DistributedOptimizer` over all ranks, if there is one. Of several optimizers, the
rarest counts, so that one step covers a whole alternation. Otherwise, the traffic is scored: the time between two
completions of the same tensor if tensors recur regularly, else the busy time per byte.
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

ACTIVE = 25  # consecutive looks with tensors and without the end of a step after which the traffic is scored
OFTEN = 8  # minimum number of reductions of a tensor that counts as recurring
SHARE = 0.1  # minimum share of the bytes that the rarest recurring tensors have together
PERIODS = 40  # number of periods by which regularity is judged
PAUSES = 0.05  # share of the periods that may be of any length: pauses
UNEVEN = 1.3  # maximum ratio of the other periods' mean to the median
SHORTEST = 0.005  # minimum seconds of a sample; shorter periods are combined
REMEMBERED = 32  # number of marks that are remembered for each step that is needed


def find_rarest_optimizer(marks: Sequence[Mark], needed: int) -> int | None:
    """Return the optimizer with the longest steps, once some optimizer has had `needed` steps; None before that."""
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


def choose_anchor(definitions: Iterable[Mapping[str, Any]]) -> str | None:
    """Choose the tensor whose completions delimit periods: one of the rarest that have their share of the bytes.

    This avoids tensors that pass several times in a period, and tensors of an occasional validation. `definitions` come
    from `core.Engine.definitions`. The result is None if recurring tensors have no names of their own, or none recurs.
    """
    often = sorted(  # a definition without bytes of its own counts for little
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


def is_periodic(gaps: Sequence[float]) -> bool:
    """Return whether gaps are successive periods of one tensor, not of several tensors that share a name."""
    usual = sorted(gaps)[: len(gaps) - math.floor(PAUSES * len(gaps))]
    return statistics.mean(usual) <= UNEVEN * statistics.median(gaps)


class Listener:
    """Observer of a job until its score can be chosen, with the engine of rank 0.

    It observes at least `needed` steps of one optimizer, or periods.
    """

    def __init__(self, engine: core.Engine, steps: Steps, needed: int) -> None:
        self._engine = engine
        self._steps = steps
        self._needed = max(needed, STEPPED)
        self._heard: list[Mark] = []
        self._tensors = engine.counters()["tensors"]
        self._active = 0  # consecutive looks with tensors and without the end of a step
        self._began = self._window = 0  # tensors counted before those looks, and in the last one
        self._anchor: str | None = None
        self._passed = 0  # completions of the anchor tensor before they were marked
        self._ends: list[int] = []
        self._entries: int | None = None  # number when the first step was seen or the anchor chosen
        self._before: list[int] = []  # sources of the steps that were seen by then

    def count_steps(self, score: Score) -> int:
        """Return the number of steps or periods so far."""
        if score.source == TRAFFIC:
            return self._passed + len(self._ends)
        return sum(mark.source == score.source for mark in self._heard)

    def compute_mean_entries(self, score: Score) -> float:
        """Return the mean number of entries of a step or period; 0 if unknown."""
        if self._entries is None:
            return 0.0
        heard = (
            len(self._ends) if score.source == TRAFFIC else self.count_steps(score) - self._before.count(score.source)
        )
        return max(0, self._engine.counters()["entries"] - self._entries) / max(heard, 1)

    @property
    def idle(self) -> bool:
        """True as long as there is nothing to score by."""
        return not self._heard and self._anchor is None

    def choose_score(self) -> Score | None:
        """Look at new marks; call it a few times a second. Return the score once it is chosen, else None."""
        marks = self._steps.read_marks()
        stepped = [mark for mark in marks if mark.source != TRAFFIC]
        self._heard = (self._heard + stepped)[-REMEMBERED * self._needed :]
        if stepped and not self._before:
            self._entries, self._before = self._engine.counters()["entries"], [mark.source for mark in stepped]
        source = find_rarest_optimizer(self._heard, self._needed)
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
        self._anchor = choose_anchor(definitions)
        self._passed = sum(each["times"] for each in definitions if each["name"] == self._anchor)
        if self._anchor is None:
            return self._by_bytes()
        self._ends.clear()
        self._entries, self._before = self._engine.counters()["entries"], []
        self._engine.mark_traffic(self._anchor)
        return None

    def _by_periods(self, name: str) -> Score | None:
        # A period is like a step: its time is what the user waits for, including computation and overlap. Busy time per
        # byte also counts communication that is hidden behind computation, so it is second best.
        gaps = [(end - begin) / 1e9 for begin, end in zip(self._ends, self._ends[1:], strict=False)]
        if len(gaps) < max(PERIODS, self._needed):
            return self._by_bytes() if self._active > 8 * ACTIVE else None
        if not is_periodic(gaps):
            return self._by_bytes()
        every = max(1, math.ceil(SHORTEST / statistics.median(gaps)))
        self._engine.mark_traffic(name, every)
        return Score(unit="seconds per period", subject=f"a period of {name!r}", source=TRAFFIC, every=every)

    def _by_bytes(self) -> Score | None:
        if on_gpus(self._engine):
            # The traffic does not show when the GPU has finished a tensor; only steps or periods do. So it starts anew.
            self._active, self._anchor = 0, None
            self._ends.clear()
            self._engine.mark_traffic()
            return None
        self._engine.mark_traffic(window=self._window)
        return Score(unit="busy seconds per GiB", subject="a byte", spent="busy time", source=TRAFFIC, busy=True)
