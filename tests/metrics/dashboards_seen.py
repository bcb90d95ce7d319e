"""Command `make dashboards-seen`: record what the dashboards show of a real job with faults.

A real Prometheus with the configuration that `enginerun dashboards export` writes scrapes an elastic training of eight
ranks on two hosts, which are this machine twice, with the tuner. One rank is slowed down until the alert for it fires,
one is killed, and one is stopped until the alert for that fires. The command fails if an alert fires for another rank,
or if a query of a panel gets no series. It takes ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import environment
from engine.metrics.dashboards import TARGETS, export
from grafana.preview.recording import Source, find_unanswered, record_dashboards

from ..launch.launch_jobs import Launcher
from ..waiting import let_pass, marked, until
from .prometheus_server import ROOT, Programs, Server, find

NAME = "seen"
RANKS = 8
SLOW, KILLED, STOPPED = 5, 2, 6
QUIET = 45.0  # seconds between two faults
SEARCH = 150.0  # seconds at the start, in which the tuner searches
PATIENCE = 240.0  # most seconds until an alert fires
RECORDED = ROOT / "benchmarks" / "history" / "recorded" / "dashboards.json"
OPTIONS = f"""
    -np {RANKS} --min-np 4 -H a:4,b:4 --network-interface lo --no-binding --blacklist-cooldown-range 5 10
    --metrics-port 0 --run-name {NAME} --stall-check-warning-time-seconds 10
    --autotune --autotune-cache off --autotune-steps-per-sample 40 --autotune-warmup-samples 1
    --autotune-bayes-opt-max-samples 15
""".split()


@dataclass
class Fault:
    """Something that was done to a rank, with the times at which it began and ended."""

    text: str
    rank: int
    begun: float
    ended: float = 0.0


@dataclass
class Seen:
    """The job, the Prometheus that scrapes it, and what was done to the job."""

    server: Server
    launcher: Launcher
    process: subprocess.Popen[bytes]
    log: Path
    faults: list[Fault] = field(default_factory=list)

    def until_is(self, expr: str, what: str, seconds: float = PATIENCE) -> None:
        """Wait until an instant query has an answer, as long as the job runs."""

        def look() -> object:
            assert self.process.poll() is None, f"the job has ended:\n{self.log.read_text()}"
            return self.server.query(expr)

        until(look, what, seconds, pause=0.5)

    def pid(self, rank: int) -> int:
        """Return the process of a rank, which changes if the rank is replaced."""
        return int((self.launcher.home / f"pid.{rank}").read_text())

    def begin(self, text: str, rank: int) -> Fault:
        """Note the start of a fault."""
        print(f"{text} {rank}", flush=True)
        self.faults.append(Fault(text, rank, time.time()))
        return self.faults[-1]

    def expect_alert(self, alert: str, labels: str, ranks: set[str]) -> None:
        """Wait until an alert fires, and for some seconds more; it may fire for no rank but these."""
        firing = f'ALERTS{{alertname="{alert}", alertstate="firing", run="{NAME}"}}'
        self.until_is(f"{firing[:-1]}, {labels}}}" if labels else firing, f"{alert} fires")
        let_pass(15.0)
        assert {found.get("rank", "") for found, _ in self.server.query(firing)} == ranks, alert


def slow_down(seen: Seen) -> float:
    """Let a rank be late at each step until the alert for stragglers fires for it; return a time at which it does."""
    late = seen.launcher.home / f"slow.{SLOW}"
    fault = seen.begin("60 ms late at each step: rank", SLOW)
    late.touch()
    seen.expect_alert("EngineStraggler", f'rank="{SLOW}"', {str(SLOW)})
    moment = time.time()
    let_pass(5.0)  # so that the scrape after this moment is of the slow rank, too
    late.unlink()
    fault.ended = time.time()
    return moment


def kill(seen: Seen) -> None:
    """Kill a rank, and wait for the world with the one that takes its place."""
    worlds = f'engine_elastic_worlds_total{{run="{NAME}"}}'
    fault = seen.begin("killed by SIGKILL, then replaced: rank", KILLED)
    os.kill(seen.pid(KILLED), signal.SIGKILL)
    seen.until_is(f'{worlds} >= 3 and engine_elastic_size{{run="{NAME}"}} == {RANKS}', "a world of all ranks again")
    fault.ended = time.time()


def stop(seen: Seen) -> None:
    """Stop a rank until the alert for stalls fires."""
    pid = seen.pid(STOPPED)
    fault = seen.begin("stopped by SIGSTOP, then continued: rank", STOPPED)
    os.kill(pid, signal.SIGSTOP)
    try:
        seen.expect_alert("EngineStall", "", {""})
    finally:
        os.kill(pid, signal.SIGCONT)
    fault.ended = time.time()


def run_job(programs: Programs, directory: Path) -> dict[str, Any]:
    """Run the job and return the recording of what Prometheus answered."""
    export(directory)
    home = directory / "job"
    home.mkdir()
    launcher = Launcher(home)
    launcher.environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    log = directory / "job.log"
    with ExitStack() as stack:
        server = stack.enter_context(Server(programs, directory, (directory / "prometheus.yml").read_text()))
        stack.callback(_end_job, launcher)
        command = [sys.executable, "-P", "-m", "engine.launch", *OPTIONS]
        command += ["--launch-agent", "env HOST={host}", "--metrics-file-sd", str(directory / TARGETS)]
        with log.open("wb") as output:
            process = launcher.start_command(
                [*command, sys.executable, "-P", "-m", "tests.metrics.seen_training"], stdout=output, stderr=output
            )
        seen = Seen(server, launcher, process, log)
        seen.until_is(f'count(engine_step_duration_seconds_count{{run="{NAME}"}} > 0) == {RANKS}', "all ranks step")
        start = time.time()
        print("eight ranks train, and the tuner searches", flush=True)
        let_pass(SEARCH)
        moment = slow_down(seen)
        let_pass(QUIET)
        kill(seen)
        let_pass(QUIET)
        stop(seen)
        let_pass(QUIET)
        source = Source(server.url, NAME, start, time.time(), moment=moment)
        boards = record_dashboards(source)
        (home / "end").touch()
        assert process.wait(100) == 0, log.read_text()
    begun = source.start
    return {
        "about": _describe_run(programs),
        "seconds": round(source.end - begun, 1),
        "step": source.step,
        "moment": round(moment - begun, 1),
        "faults": [
            {
                "text": f"{one.text} {one.rank}",
                "rank": one.rank,
                "times": [round(one.begun - begun), round(one.ended - begun)],
            }
            for one in seen.faults
        ],
        "boards": boards,
    }


def _end_job(launcher: Launcher) -> None:
    """End what is left of the job, also a rank that is stopped."""
    for pid in marked(launcher.mark):
        os.kill(pid, signal.SIGKILL)
    for process in launcher.started:
        process.wait()


def _describe_run(programs: Programs) -> list[str]:
    """Return what the pictures say of the run."""
    facts = environment.record()
    version = subprocess.run([programs.prometheus, "--version"], capture_output=True, text=True, check=True)
    number = re.search(r"version (\d+\.\d+)", version.stdout + version.stderr)
    return [
        f"Revision {facts['revision']}, {facts['date'][:10]}",
        f"{RANKS} ranks on {facts['usable_processors']} cores, as two hosts; elastic, with the tuner",
        f"Answers of Prometheus {number[1] if number else ''} to each panel's queries; drawn without Grafana",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.metrics.dashboards_seen", description=__doc__)
    parser.add_argument("--out", type=Path, default=RECORDED, help="file of the recording")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dashboards-seen-") as directory:
        content = run_job(find(), Path(directory))
    if unanswered := list(find_unanswered(content["boards"])):
        print("\n".join(unanswered), file=sys.stderr)
        return 1
    given.out.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
    print(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
