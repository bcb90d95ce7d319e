"""Start of a job on several hosts, by its phases: agents, ranks, imports of the script, and the rendezvous.

And what a user waits for on one host: an import of the engine, and the first line of a script under `enginerun`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.common import environment, progress, records
from benchmarks.common.processes import RankError
from benchmarks.common.tables import Table, format_duration
from tests.launch.host_jobs import namespaces, why_no_namespaces

PARTS = {
    "ranks": "until every rank runs its first line: launcher, agents, interpreters",
    "imports": "from there until the last rank has imported numpy and the engine",
    "meeting": "from there until every rank has returned from `init` and a barrier",
    "end": "from there until the launcher has ended",
}
START = "start without what the script imports"
# Imports come first, so that they are measured apart from `init`.
PROGRAM = """
import time; times = [time.time()]
import numpy, engine, engine.collectives.collectives, engine.session.runtime
times.append(time.time()); engine.init(); engine.barrier(); times.append(time.time())
import json; print(json.dumps(times), flush=True)
"""


# What is started on one host, by the name of its figure; each shows the time of its first line.
FIRST_LINE = "import time; print(time.time())"
HERE = {
    "python": ["-c", FIRST_LINE],
    "numpy": ["-c", "import numpy; " + FIRST_LINE],
    "engine": ["-c", "import engine; " + FIRST_LINE],
    "enginerun": ["-m", "engine.launch", "-np", "2", "--quiet", sys.executable, "-c", FIRST_LINE],
}
BEYOND = {
    "import engine, beyond import numpy": ("engine", "numpy"),
    "first line under enginerun -np 2, beyond that of Python": ("enginerun", "python"),
}


@dataclass(frozen=True)
class StartSettings:
    """Job to start, and the number of repetitions."""

    hosts: int = 4
    per_host: int = 4
    rounds: int = 7

    def check(self) -> None:
        """Raise ValueError if such a job is not possible."""
        if min(self.hosts, self.per_host, self.rounds) < 1 or self.hosts > 200 or self.hosts * self.per_host > 256:
            raise ValueError("a job has 1 to 200 hosts, and 256 ranks at most")


def run(settings: StartSettings, console: Console) -> Path:
    """Measure, and write `out/start.json`."""
    settings.check()
    if reason := why_no_namespaces():
        raise RankError(reason)
    before, began = environment.record(), time.perf_counter()
    addresses = [f"10.79.3.{number}" for number in range(1, settings.hosts + 1)]
    rows: list[dict[str, float]] = []
    with (
        namespaces(addresses) as agents,
        progress.show_progress(
            console, f"{settings.hosts} x {settings.per_host} ranks", settings.rounds + 1
        ) as advance,
    ):
        hosts = ",".join(f"{address}:{settings.per_host}" for address in addresses)
        command = [sys.executable, "-m", "engine.launch", "-H", hosts, agents, "--quiet", sys.executable, "-c", PROGRAM]
        for _ in range(settings.rounds + 1):
            rows.append(_start(command, settings.hosts * settings.per_host))
            advance("jobs")
    results = {"results": rows[1:], "seconds": round(time.perf_counter() - began, 1)}  # The first one fills caches.
    return records.write("start", asdict(settings), before, results)


def _start(command: list[str], ranks: int) -> dict[str, float]:
    """Start a job, and return the seconds of each phase."""
    begun = time.time()
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    ended = time.time()
    times = [json.loads(line.partition(":")[2]) for line in done.stdout.splitlines()]
    if done.returncode or len(times) != ranks:
        raise RankError(f"the job ended with {done.returncode}: {done.stderr[-1000:]}")
    first, imported, met = (max(each) for each in zip(*times, strict=True))
    return {"ranks": first - begun, "imports": imported - first, "meeting": met - imported, "end": ended - met}


def run_here(rounds: int, console: Console) -> Path:
    """Measure the start on this host, everything in turn, and write `out/start-here.json`."""
    before, rows = environment.record(), []
    with progress.show_progress(console, "this host", rounds + 1) as advance:
        for _ in range(rounds + 1):
            rows.append({name: _find_first_line(arguments) for name, arguments in HERE.items()})
            advance("rounds")
    return records.write("start-here", {"rounds": rounds}, before, {"results": rows[1:]})


def _find_first_line(arguments: list[str]) -> float:
    """Return the seconds from the start of Python to the first line, of the last rank if there are several."""
    begun = time.time()
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=True)
    return max(float(line.rpartition(":")[2]) for line in done.stdout.splitlines()) - begun


def build_tables_here(content: dict[str, Any]) -> list[Table]:
    """Return the table of `out/start-here.json`."""
    rows = content["results"]
    table = Table("Start on one host", ["part", "median", "least", "most"])
    for name in HERE:
        values = [row[name] for row in rows]
        table.rows.append([name, *map(format_duration, (median(values), min(values), max(values)))])
    for title, (name, other) in BEYOND.items():
        values = [row[name] - row[other] for row in rows]
        table.rows.append([title, *(f"{1e3 * each(values):.0f} ms" for each in (median, min, max))])
    table.note = f"{len(rows)} rounds. {environment.describe(content['environment'])}"
    return [table]


def build_tables(content: dict[str, Any]) -> list[Table]:
    """Return the table of `out/start.json`."""
    settings, rows = content["settings"], content["results"]
    what = (
        f"Start of {settings['hosts'] * settings['per_host']} ranks on {settings['hosts']} hosts, which are namespaces"
    )
    table = Table(what, ["part", "median", "least", "most"])
    parts = {name: [row[name] for row in rows] for name in PARTS}
    starts = [row["ranks"] + row["meeting"] for row in rows]
    for title, values in [*((PARTS[name], parts[name]) for name in PARTS), (START, starts)]:
        table.rows.append([title, *map(format_duration, (median(values), min(values), max(values)))])
    note = f"{settings['rounds']} jobs; a build in place looks for changed sources on import."
    table.note = f"{note} {environment.describe(content['environment'])}"
    return [table]
