"""Late steps of a run: on which rank they were late, and why. Pure.

Each rank judges its own steps (engine_ext/control/step_clock.pxd), so a late step is counted by the rank on which it
was late, with the cause, and by ranks that waited for it, with the cause `rank`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...text.readable import format_count, format_ranks, format_seconds
from ..page import Snapshot
from .rates import Page

SHOWN = 3  # maximum number of ranks with their causes in a line
WAITED = "rank"  # cause of a step that was late because another rank was


@dataclass(frozen=True)
class LateRank:
    """Late steps of one rank."""

    steps: Mapping[str, int]  # number by the rank's own cause; causes without a step are left out
    seconds: Mapping[str, float]  # by how much they lasted longer than the median, by cause
    waited: int  # number of late steps in which it waited for another rank
    blind: bool = False  # whether its kernel does not tell how long it waits for a processor

    @property
    def count(self) -> int:
        """Number of steps that were late because of this rank."""
        return sum(self.steps.values())

    @property
    def total(self) -> float:
        """Seconds by which those steps lasted longer than the median."""
        return sum(self.seconds.values())


def collect_late_steps(pages: Mapping[int, Page]) -> dict[int, LateRank]:
    """Return the late steps of each rank whose page can be read, by rank."""
    return {
        key: LateRank(
            steps={cause: count for cause, count in page.late_steps.items() if count and cause != WAITED},
            seconds={cause: each for cause, each in page.late_seconds.items() if each and cause != WAITED},
            waited=page.late_steps[WAITED],
            blind=page["late_blind"] != 0,
        )
        for key, page in sorted(pages.items())
        if isinstance(page, Snapshot) and page.state != "new"
    }


def describe_late_steps(late: Mapping[int, LateRank]) -> str | None:
    """Describe the late steps in a line, the ranks that cost most first; None if there were none."""
    described = _describe_ranks(late)
    blind = [key for key in late if late[key].blind]
    if described is None or not blind:
        return described
    return f"{described}; waits for a processor are not known on {format_ranks(blind)}"


def _describe_ranks(late: Mapping[int, LateRank]) -> str | None:
    ranks = sorted((key for key in late if late[key].count), key=lambda key: -late[key].total)
    if not ranks:
        waiting = [key for key, each in late.items() if each.waited]
        return f"{format_ranks(waiting)} waited, and no rank was late by itself" if waiting else None
    parts = [f"rank {key} {_describe_causes(late[key])}" for key in ranks[:SHOWN]]
    if len(ranks) > SHOWN:
        rest = sum(late[key].count for key in ranks[SHOWN:])
        parts.append(f"{rest} more on {format_count(len(ranks) - SHOWN, 'other rank')}")
    return "; ".join(parts)


def _describe_causes(late: LateRank) -> str:
    """Describe the causes of a rank's late steps: `9 by input (420 ms), 3 by gc (51 ms)`."""
    causes = sorted(late.steps, key=lambda cause: -late.seconds.get(cause, 0.0))
    return ", ".join(
        f"{late.steps[cause]} by {cause} ({format_seconds(late.seconds.get(cause, 0.0))})" for cause in causes
    )
