"""Observation of a job on hosts with different boot times: times, late ranks, and waiting for the network."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.metrics.report.rates import find_straggler, slow_host
from engine.trace.merging import merge
from engine.trace.reading import Recording, read

from ..netns import Hosts, need_hosts
from ..strange import uptime
from ..waiting import until

need_hosts()
if reason := uptime.refusal():
    print(reason)
    pytest.skip(reason, allow_module_level=True)

ROOT = Path(__file__).parents[2]
DAY = 86_400
AHEAD = (10 * DAY, 20 * DAY, 0)  # rank 0's host is neither the oldest nor the youngest: differences have both signs
HOST_OF = (0, 0, 1, 1, 2)
ALL_HOSTS = "node0:2,node1:2,node2:1"
LASTS = 300.0  # upper bound of a job's duration in seconds
LAUNCH = [sys.executable, "-m", "engine.launch"]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(3, AHEAD) as made:
        yield made


@dataclass
class Observed:
    """A job that has ended, with its metrics, logs and timelines."""

    home: Path
    told: dict[int, dict[str, Any]]
    said: str
    top: str

    def series(self, name: str) -> dict[tuple[str, ...], float]:
        """Values of a metric, by rank and host waited for."""
        found = re.findall(rf"^{name}\{{(.*?)\}} (\S+)$", (self.home / "a.prom").read_text(), re.MULTILINE)
        labels = [dict(re.findall(r'(\w+)="([^"]*)"', each)) for each, _ in found]
        keys = [tuple(each[key] for key in ("rank", "peer") if key in each) for each in labels]
        return {key: float(value) for key, (_, value) in zip(keys, found, strict=True)}

    @property
    def lags(self) -> dict[int, float]:
        """Mean lag in seconds behind the first rank, by rank."""
        sums, counts = (self.series(f"engine_arrival_lag_seconds_{each}") for each in ("sum", "count"))
        return {int(key[0]): sums[key] / counts[key] for key in sums}

    @property
    def late(self) -> dict[int, float]:
        """Total lag in seconds, by rank."""
        return {int(key[0]): value for key, value in self.series("engine_arrival_lag_seconds_sum").items()}

    @property
    def crossing(self) -> dict[int, float]:
        """Seconds that other hosts have waited for each host: mean over a host's ranks, least over the hosts."""
        waits: dict[int, dict[int, list[float]]] = {}
        for (rank, peer), value in self.series("engine_crossing_seconds_total").items():
            of_host = waits.setdefault(int(peer.removeprefix("node")), {})
            of_host.setdefault(HOST_OF[int(rank)], []).append(value)
        return {host: min(sum(each) / len(each) for each in waiting.values()) for host, waiting in waits.items()}

    @property
    def recordings(self) -> list[Recording]:
        """Timelines as read from the files of all hosts."""
        notes: list[str] = []
        found = read(sorted(self.home.glob("t.rank*.json")), notes)
        assert not notes
        return found


def observe(
    hosts: Hosts, home: Path, steps: int, joins: tuple[int, ...] = (), late: int = -1, where: str = ALL_HOSTS
) -> Observed:
    """Run a job by the launcher, whose agents start in the hosts, and observe it after some steps."""
    enter = home / "enter"
    cases = "".join(f'node{k}) exec {" ".join(hosts.entering(k))} env --chdir={ROOT} "$@" ;;\n' for k in range(3))
    enter.write_text(f"#!/bin/sh\nhost=$1\nshift\ncase $host in\n{cases}esac\n")
    enter.chmod(0o755)
    options = ["-H", where, "--launch-agent", f"{enter} {{host}}", "--no-binding", "--summary"]
    options += ["--timeline", str(home / "t.json"), "--metrics-textfile", str(home / "a.prom"), "--run-name", "seen"]
    given = json.dumps({"home": str(home), "steps": steps, "joins": joins, "late": late})
    with open(home / "said", "w") as said:
        process = subprocess.Popen(
            [*LAUNCH, *options, sys.executable, "-m", "tests.hosts.observed_program"],
            cwd=ROOT,
            env={**os.environ, "OBSERVED": given, "ENGINE_STALL_WARNING": "0.3"},
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
    with process:
        if joins:
            until(lambda: "for rank" in (home / "said").read_text(), "a warning", 120.0)
            (home / "warned").touch()
        until((home / "going").exists, "some steps", 120.0)
        top = subprocess.run(
            [*LAUNCH, "top", str(process.pid), "--once", "--interval", "1.2"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "COLUMNS": "160"},
        )
        (home / "stop").touch()
        out, _ = process.communicate(timeout=120)
    text = (home / "said").read_text()
    assert process.returncode == 0, text
    lines = [json.loads(line.partition(":")[2]) for line in out.splitlines()]
    return Observed(home, {line["rank"]: line for line in lines}, text, top.stdout + top.stderr)


@pytest.fixture(scope="module")
def late(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Observed:
    """A job in which rank 3 is late by 150 ms in each step, and the last to join."""
    return observe(hosts, tmp_path_factory.mktemp("late"), 30, joins=(4, 0, 2, 1, 3), late=3)


@pytest.fixture(scope="module")
def slow(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Observed:
    """A job in which the second host has a slow link."""
    hosts.slow(1, "40mbit")
    try:
        return observe(hosts, tmp_path_factory.mktemp("slow"), 10)
    finally:
        hosts.run(1, "tc", "qdisc", "del", "dev", "eth0", "root")


@pytest.mark.slow
def test_the_clocks_of_hosts_are_compared(late: Observed) -> None:
    """The measured clock difference is the true one, within its stated error."""
    for rank, told in late.told.items():
        ahead, error = told["clock"]
        true = (AHEAD[0] - AHEAD[HOST_OF[rank]]) * 10**9
        assert abs(ahead - true) <= error + 1_000_000, (rank, told)
        assert error < 10**9


def test_places_over_hosts(late: Observed) -> None:
    assert [late.told[rank]["cross"] for rank in range(5)] == [
        [0, 3, 0, 2],
        [0, 2, 1, 2],
        [1, 3, 0, 2],
        [1, 2, 1, 2],
        [2, 3, 0, 1],
    ]


def test_the_last_to_join_is_told(late: Observed) -> None:
    """The ranks of the last host have, by their own clocks, joined days after all others."""
    assert {told["last"] for told in late.told.values()} == {3}


def test_a_stall_is_told_with_its_true_length(late: Observed) -> None:
    [seconds] = set(re.findall(r"'first' \(allreduce\) has waited (\d+) s for rank 4", late.said))
    assert int(seconds) < LASTS


def test_a_late_rank_leads_the_lag_and_no_host_the_waiting(late: Observed) -> None:
    """The lag is attributed to the rank in spite of the clocks, and no host is called slow for it."""
    assert find_straggler(late.lags, None) == 3, late.lags
    assert 0.01 < late.lags[3] < 1.0, late.lags
    assert max(lag for rank, lag in late.lags.items() if rank != 3) < late.lags[3] / 2, late.lags
    assert max(late.crossing.values()) < late.late[3] / 2, (late.crossing, late.late)
    assert re.search(r"slowest rank: +3, ", late.said)


@pytest.mark.slow
def test_a_slow_link_leads_the_waiting_and_no_rank_the_lag(slow: Observed) -> None:
    """The summary advises to look at the network of that host."""
    lasted = max(slow.crossing.values())
    assert slow_host({host: waited / lasted for host, waited in slow.crossing.items()}) == 1, slow.crossing
    assert max(slow.late.values()) < lasted / 2, (slow.crossing, slow.late)
    assert "look at the network of node1" in slow.said


def test_a_slow_link_between_two_hosts_is_named(hosts: Hosts, tmp_path: Path) -> None:
    """Neither of two hosts can go on without the other, so both wait equally long, whichever is slow."""
    hosts.slow(1, "40mbit")
    try:
        seen = observe(hosts, tmp_path, 20, where="node0:2,node1:1")
    finally:
        hosts.run(1, "tc", "qdisc", "del", "dev", "eth0", "root")
    named = "slow link: node0 - node1|most waited for: node1"
    assert re.search(named, " ".join(seen.top.split())), (seen.top, seen.crossing)
    assert re.search("the link between node0 and node1 is slow|look at the network of node1", seen.said), seen.said
    assert find_straggler(seen.lags, None) is None, seen.lags


def test_what_is_sent_is_what_comes(late: Observed) -> None:
    sent, received = (late.series(f"engine_network_{each}_bytes_total") for each in ("sent", "received"))
    assert all(value > 0 for value in (*sent.values(), *received.values()))
    # A rank counts at the end of each of its entries: data still in transit then is not counted any more.
    assert sum(received.values()) == pytest.approx(sum(sent.values()), rel=0.05)


@pytest.mark.parametrize("which", ["late", "slow"])
def test_top_shows_hosts(which: str, request: pytest.FixtureRequest) -> None:
    seen: Observed = request.getfixturevalue(which)
    rows = [line.split() for line in seen.top.splitlines()]
    hosts = {row[0]: row[1] for row in rows if len(row) > 5 and row[0].isdigit()}
    assert hosts == {str(rank): f"node{host}" for rank, host in enumerate(HOST_OF)}, seen.top
    assert "3 hosts" in seen.top and seen.top.count(" running") == 5, seen.top
    if which == "slow":
        assert "most waited for: node1" in seen.top, seen.top
    else:
        assert re.search(r"^ +3 +node1 .* < ", seen.top, re.MULTILINE), seen.top
    assert not re.search(r"\d{3,}:\d\d:\d\d|\d d", seen.top), f"a time of days\n{seen.top}"
    assert "node0 ranks 0, 1; node1 ranks 2, 3; node2 rank 4" in seen.said


def test_the_timelines_of_all_hosts_are_one(late: Observed, tmp_path: Path) -> None:
    """An operation's submission comes before its completion on every rank, whatever the hosts' clocks say."""
    error = 2e-9 * max(told["clock"][1] for told in late.told.values()) + 1e-3
    recordings = [each for each in late.recordings if each.number == 0]
    in_set = [each for each in late.recordings if each.number != 0]
    assert {each.about["hosts"] for each in recordings} == {3}
    assert [each.rank for each in recordings] == list(range(5)) and [each.rank for each in in_set] == [2, 4]
    pairs = {key for key in in_set[0].tensors if key[1] == "in_set"} & in_set[1].tensors.keys()
    assert len(pairs) > 5
    for key in pairs:
        one, other = (each.tensors[key] for each in in_set)
        assert max(one.submitted, other.submitted) <= min(one.ended, other.ended) + error, key
        assert one.ready <= one.ended + error and 0 <= one.late < LASTS
    shared = set.intersection(*({key for key in each.tensors if key[1].startswith("t")} for each in recordings))
    assert len(shared) > 20
    last = []
    for key in shared:
        each = [recording.tensors[key] for recording in recordings]
        assert max(one.submitted for one in each) <= min(one.ended for one in each) + error, key
        assert all(one.submitted <= one.ready + error and one.ready <= one.ended + error for one in each), key
        assert all(0 <= one.late < LASTS for one in each)
        last += [each[0].last]
    assert last.count(3) > len(last) / 2, "rank 3 is late"
    times = [time for each in recordings for one in each.tensors.values() for time in (one.submitted, one.ended)]
    assert max(times) - min(times) < LASTS
    notes: list[str] = []
    merge(sorted(late.home.glob("t.rank*.json")), tmp_path / "all.json", notes)
    assert not notes


def test_times_of_metrics_are_those_of_the_launchers_clock(late: Observed) -> None:
    lasts = late.series("engine_last_collective_timestamp_seconds")
    now = (late.home / "a.prom").stat().st_mtime
    assert all(abs(now - value) < LASTS for value in lasts.values()), (now, lasts)
