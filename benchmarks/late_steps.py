"""Verdicts on late steps: steps of a training are delayed on purpose, in five ways, and the ranks say why.

Two ranks on two hosts that are namespaces of this machine, each on a processor of its own and before other programs by
its priority. `tests/metrics/delayed_steps.py` has the training and the delays.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import environment, progress, records
from benchmarks.common.tables import Table
from tests.metrics import delayed_steps
from tests.netns import Hosts, lacking

RIGHT = 0.95
"""Target: smallest share of delays with the right cause on the right rank."""


@dataclass(frozen=True)
class LateStepSettings:
    """Delays to make."""

    delays: int = 200
    seeds: tuple[int, ...] = (1,)

    def check(self) -> None:
        """Raise ValueError if the delays cannot be made on this machine."""
        if reason := lacking():
            raise ValueError(reason)
        if not delayed_steps.can_steal():
            raise ValueError("delays need two processors, and the right to take them from ranks by SCHED_FIFO")


def run(settings: LateStepSettings, console: Console) -> Path:
    """Delay steps, and write `out/late-steps.json`."""
    settings.check()
    before = environment.record()
    begun = time.perf_counter()
    rows: list[dict[str, Any]] = []
    with progress.show_progress(console, f"{settings.delays} delays", len(settings.seeds)) as advance:
        for seed in settings.seeds:
            plan = delayed_steps.plan_delays(settings.delays, delayed_steps.KINDS, seed)
            with Hosts(delayed_steps.RANKS) as hosts:
                found = delayed_steps.run_delays(plan, hosts)
            outcome = delayed_steps.judge_delays(plan, found)
            confusion = [[kind, verdict, count] for (kind, verdict), count in sorted(outcome.confusion.items())]
            counts = {"right": outcome.right, "wrong_rank": outcome.wrong_rank, "named": outcome.named}
            rows.append(
                {"seed": seed, "confusion": confusion, **counts, "others": outcome.others, "steps": outcome.steps}
            )
            advance(f"seed {seed}")
    seconds = round(time.perf_counter() - begun, 1)
    return records.write("late-steps", asdict(settings), before, {"results": rows, "seconds": seconds})


def build_tables(content: dict[str, Any]) -> list[Table]:
    """Return the table of confusion of `out/late-steps.json`, over all seeds."""
    rows = content["results"]
    verdicts = [*delayed_steps.KINDS, delayed_steps.MISSED]
    counts = Counter[tuple[str, str]]()
    for row in rows:
        for kind, verdict, count in row["confusion"]:
            counts[kind, verdict] += count
    total, right = counts.total(), sum(row["right"] for row in rows)
    table = Table(f"Verdicts on {total} delayed steps", ["delayed by", *verdicts])
    for kind in delayed_steps.KINDS:
        table.rows.append([kind, *(str(counts[kind, verdict]) for verdict in verdicts)])
    wrong = sum(row["wrong_rank"] for row in rows)
    own = sum(count for (kind, _), count in counts.items() if kind != "network")
    others = sum(sum(row["others"].values()) for row in rows)
    table.note = (
        f"Right cause and rank: {right} of {total} ({100 * right / total:.1f} %; {100 * RIGHT:.0f} % wanted), "
        f"{wrong} of the rest on the wrong rank. "
        f"The other rank named the late one in {sum(row['named'] for row in rows)} "
        f"of {own}. Of {sum(row['steps'] for row in rows)} steps, {others} more were late by themselves. "
        f"{environment.describe(content['environment'])}"
    )
    return [table]
