"""Replay of a log: the same seed and samples must give the same proposals and decisions.

With the versions of numpy and scipy, and on the processor, that wrote the log, every row must be equal. Elsewhere the
last bits of a calculation may differ. Then numbers may differ by `TOLERANCE`, and a proposal counts as reproduced if
the expected improvement of the logged setting is within `TOLERANCE` of that of the new one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from autotune.bounded_reader import get_whole
from autotune.journal import JournalError, describe_environment
from autotune.policy import Tuner
from autotune.space import Space
from autotune.trials import LARGEST_SEED, MOST_TRIALS, Settings

TOLERANCE = 1e-6
EXACT_IN = ("numpy", "scipy", "machine", "processor")
#: Fields written by the journal, not by the policy.
STAMPS = {"n", "schema", "time", "environment", "about"}


@dataclass(frozen=True)
class Replay:
    """Result of a successful replay."""

    proposals: int  # number that was reproduced
    decisions: int  # number that was reproduced
    exact: bool  # whether every number was exactly equal
    differences: list[str]  # differences between this environment and that of the log


def create_tuner(row: dict[str, Any], journal: Any = None) -> Tuner:
    """Create the tuner that began a log with this row; raise JournalError if the row is invalid."""
    known = {field.name for field in fields(Settings)}
    unknown = set(row["settings"]) - known
    if unknown:
        raise JournalError(f"line 1: settings {sorted(unknown)} are unknown; the policy has {sorted(known)}")
    try:
        space = Space.from_description(row["space"])
        seed, trials = get_whole(row, "seed", 0, LARGEST_SEED), get_whole(row, "max_trials", 1, MOST_TRIALS)
        return Tuner(space, row["default"], seed, trials, row["first"], Settings(**row["settings"]), journal)
    except (TypeError, ValueError) as error:
        raise JournalError(f"line 1: {error}") from error


def replay_log(rows: Sequence[dict[str, Any]]) -> Replay:
    """Replay a log's rows, as read by `autotune.journal.read`.

    Raises JournalError if a row differs from the policy's result now, or cannot follow the previous ones; the text
    shows both.
    """
    missing = {field.name for field in fields(Settings)} - set(rows[0]["settings"])
    if missing:
        raise JournalError(
            f"line 1: an earlier version of the policy wrote this log, without {sorted(missing)}: this one decides "
            "in another way and cannot go through it again. `autotune show` and `autotune best` read it"
        )
    here = describe_environment()
    there = rows[0].get("environment", {})
    differing = [name for name in EXACT_IN if here[name] != there.get(name)]
    differences = [f"{name} {there.get(name)} there, {here[name]} here" for name in differing]
    produced: list[dict[str, Any]] = []
    tuner = create_tuner(rows[0], produced.append)
    exact = _compare_rows(rows[0], produced[0], 1, not differences)
    for k, row in enumerate(rows):
        line = k + 1
        try:
            if row["row"] == "ask" and len(produced) == k:
                tuner.ask(as_logged=None if not differences else (row["knobs"], TOLERANCE))
            elif row["row"] == "tell" and len(produced) == k:
                tuner.tell(row["id"], row["samples"], row["status"], row.get("exposed"))
            elif row["row"] == "observe" and len(produced) == k:
                tuner.observe(row["samples"], row.get("steps"))
        except (RuntimeError, ValueError) as error:
            raise JournalError(f"line {line}: this row does not follow from those before it: {error}") from error
        if len(produced) <= k:
            raise JournalError(f"line {line}: the log has {_describe_row(row)} here, and the policy decides nothing")
        exact &= _compare_rows(row, produced[k], line, not differences)
    if len(produced) > len(rows):
        more = _describe_row(produced[len(rows)])
        raise JournalError(f"line {len(rows) + 1}: the log ends, where the policy goes on with {more}")
    kinds = [row["row"] for row in rows]
    return Replay(kinds.count("ask"), kinds.count("decide"), exact, differences)


def _compare_rows(logged: dict[str, Any], made: dict[str, Any], line: int, exactly: bool) -> bool:
    """Compare two rows; raise if they differ, and return whether they are equal to the last bit."""
    mine = {key: value for key, value in logged.items() if key not in STAMPS}
    if mine == made:
        return True
    if exactly or not _close(mine, made):
        raise JournalError(f"line {line}: the log has {_describe_row(mine)}, and the policy now {_describe_row(made)}")
    return False


def _close(a: Any, b: Any) -> bool:
    """Return whether values are equal except for the last digits of numbers and the wording of reasons."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_close(a[key], b[key]) for key in a if key not in ("why", "because"))
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_close, a, b))
    if isinstance(a, float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=1e-9)
    return bool(a == b)


def _describe_row(row: dict[str, Any]) -> str:
    knobs = " ".join(f"{name}={value}" for name, value in row.get("knobs", {}).items())
    named = {"ask": f"trial {row.get('id')}", "decide": f"the decision to {row.get('decision')}"}
    kind = named.get(row["row"], f"a row {row['row']!r}")
    return f"{kind} {knobs}".rstrip()
