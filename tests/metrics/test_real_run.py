"""End-to-end run: a real job of four ranks with the tuner, found by a real Prometheus through file_sd.

Every query of every panel and every rule is run; then one rank is slowed down, and one is killed.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from .prometheus_server import Programs, Server

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("prometheus_client", reason="needs prometheus_client")

from grafana.queries import Asked, list_panel_queries, shorten_durations

from ..ranks import Job, start_ranks
from ..waiting import let_pass, measured, until
from . import real_training

RULES = Path(__file__).parents[2] / "grafana" / "rules"
NAME = "proof"
HURRY = 12.0  # the rules' minutes are five seconds
INTERVAL = "5s"
CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: [{rules}/*.yml]
scrape_configs:
  - job_name: enginerun
    file_sd_configs: [{{files: ["{targets}/*.json"], refresh_interval: 1s}}]
"""
OPTIONS = """
    --metrics-port 0 --metrics-file-sd {targets} --run-name proof --autotune
    --autotune-steps-per-sample 10 --autotune-warmup-samples 1 --autotune-bayes-opt-max-samples 12
"""


@dataclass(frozen=True)
class Run:
    """A job, and the Prometheus that scrapes it."""

    server: Server
    job: Job
    targets: Path

    def until_is(self, condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
        """Wait until a condition holds, as long as the job runs."""

        def look() -> object:
            assert self.job.process.poll() is None, f"the job has ended:\n{self.job.result()}"
            return condition()

        until(look, what, seconds, pause=0.25)

    def firing(self, alert: str) -> set[str]:
        """Ranks for which an alert fires."""
        answer = self.server.query(f'ALERTS{{alertname="{alert}", alertstate="firing", run="{NAME}"}}')
        return {labels["rank"] for labels, _ in answer}


@pytest.fixture(scope="module")
def run(prometheus: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    directory = tmp_path_factory.mktemp("prometheus")
    targets, rules = directory / "targets", directory / "rules"
    targets.mkdir()
    rules.mkdir()
    for path in RULES.glob("*.yml"):
        (rules / path.name).write_text(shorten_durations(path.read_text(), HURRY))
        prometheus.tool("check", "rules", rules / path.name)
    config = CONFIG.format(rules=rules, targets=targets)
    options = OPTIONS.format(targets=targets).split()
    with (
        Server(prometheus, directory, config) as server,
        start_ranks(4, real_training.train, timeout=700.0, options=options) as job,
    ):
        yield Run(server, job, targets)


@pytest.mark.slow
@pytest.mark.timeout(450)
def test_file_sd_leads_to_every_rank(run: Run) -> None:
    run.until_is(lambda: len(run.server.query(f'engine_rank_up{{run="{NAME}"}} == 1')) == 4, "four ranks are up", 120.0)

    def healthy() -> bool:
        (target,) = run.server.api("targets")["activeTargets"]
        return target["health"] == "up" and target["lastError"] == ""

    run.until_is(healthy, "the endpoint answers within the second that a scrape may take")
    run.until_is(
        lambda: run.server.query(f'engine_autotune_phase{{run="{NAME}"}} == 3'), "the tuner has searched", seconds=240.0
    )
    assert run.server.query(f'engine_autotune_trials_total{{run="{NAME}"}}')[0][1] >= 3
    sizes = {labels["rank"]: value for labels, value in run.server.query("engine_world_size")}
    assert sizes == {"0": 4.0, "1": 4.0, "2": 4.0, "3": 4.0}


ASKED = [asked for asked in list_panel_queries() if "engine_elastic_" not in asked.query.expr]  # the job is not elastic


@pytest.mark.parametrize("asked", ASKED, ids=Asked.format_label)
def test_every_panel_has_an_answer_in_a_sane_range(run: Run, asked: Asked) -> None:
    """A query of a misspelt metric succeeds with no series."""
    expr = asked.make_expression(NAME, interval=INTERVAL)

    def answered() -> bool:
        end = time.time()
        now = [value for _, value in run.server.query(expr)]
        over_time = run.server.query_range(expr, end - 10, end, 1)
        values[:] = [*now, *(value for _, series in over_time for value in series)]
        return bool(now or over_time)

    values: list[float] = []
    if not answered() and asked.query.expected:  # scrapes may have been too late for so short an interval
        run.until_is(answered, f"series: {expr}")
    assert all(math.isfinite(value) and asked.query.low <= value <= asked.query.high for value in values), values


def test_every_rule_works_and_no_alert_fires(run: Run) -> None:
    rules = [rule for group in run.server.api("rules")["groups"] for rule in group["rules"]]
    assert len(rules) > 10
    assert {rule["name"]: rule.get("lastError", "") for rule in rules if rule["health"] != "ok"} == {}
    recorded = [rule["name"] for rule in rules if rule["type"] == "recording"]
    for name in recorded:
        run.until_is(lambda: run.server.query(f'{{__name__="{name}", run="{NAME}"}}'), name)  # noqa: B023
    # A machine that stalls for some seconds may fire one, which then resolves soon.
    run.until_is(lambda: not run.server.query(f'ALERTS{{alertstate="firing", run="{NAME}"}}'), "no alert fires")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_slowed_rank_is_the_straggler_and_no_other(run: Run) -> None:
    (run.job.directory / "slow.2").touch()

    def measure() -> None:
        run.until_is(lambda: run.firing("EngineStraggler") == {"2"}, "the straggler is reported, and no other")
        for _ in range(8):  # it must stay so
            assert run.firing("EngineStraggler") == {"2"}
            let_pass(0.5)

    measured(measure)
    (run.job.directory / "slow.2").unlink()
    run.until_is(lambda: not run.firing("EngineStraggler"), "it is over")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_killed_rank_is_down_and_no_other(run: Run) -> None:
    os.kill(run.job.pid(3), signal.SIGKILL)
    until(lambda: run.firing("EngineRankDown") == {"3"}, "rank 3 is down, and no other", pause=0.2)
    finished = run.job.finish(check=False)
    assert finished.code == 128 + signal.SIGKILL
    assert list(run.targets.iterdir()) == [], "the announcement is taken away"
