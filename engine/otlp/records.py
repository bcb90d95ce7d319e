"""Records of steps from which spans are made; needs no package of OpenTelemetry."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class CollectiveRecord:
    """One collective of a rank; times are unix times in nanoseconds."""

    begun: int
    ended: int
    nbytes: int
    operation: str
    algorithm: str


@dataclass(frozen=True)
class StepRecord:
    """One step of a rank; times are unix times in nanoseconds."""

    rank: int
    number: int
    begun: int
    ended: int
    blocked: float | None  # seconds in which the program was blocked in the engine; None: not known
    exposed: float | None  # seconds of communication in which the program was blocked; None: not known
    collectives: list[CollectiveRecord] = field(default_factory=list)
