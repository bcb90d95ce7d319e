"""Findings of the checks of a release, one for each thing that was looked at."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class CheckState(enum.Enum):
    """State of a check after it was looked at; the value is the word in the table."""

    PASSED = "passed"
    FAILED = "FAILED"
    UNTRIED = "not tried"  # it cannot be tried on this machine, or not yet


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    subject: str  # what was checked: "sdist", "wheel cp311-x86_64"
    state: CheckState
    text: str  # what was found; of a failure, how to mend it; of what was not tried, why

    def __str__(self) -> str:
        return f"{self.subject}: {'' if self.state is CheckState.PASSED else f'{self.state.value}: '}{self.text}"


def format_table(findings: Sequence[Finding]) -> str:
    """Format findings as a table with one line each, and a last line with their numbers."""
    width = max((len(finding.subject) for finding in findings), default=0)
    states = max(len(state.value) for state in CheckState)
    lines = []
    for finding in findings:
        first = (finding.text.splitlines() or [""])[0]
        shown = first if len(first) <= 120 else f"{first[:117]}..."
        lines.append(f"{finding.subject:{width}}  {finding.state.value:{states}}  {shown}".rstrip())
    counts = [f"{sum(finding.state is state for finding in findings)} {state.value}" for state in CheckState]
    return "\n".join([*lines, ", ".join(counts)])
