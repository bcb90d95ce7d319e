"""The summary of a run, and its advice."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.metrics import names, page
from engine.metrics.report import advice
from engine.metrics.report.rates import Page
from engine.metrics.report.summary import FEW_STEPS, Run, compute_figures, find_percentile, format_summary

from .written_pages import snapshot, words_of

MS = 1_000_000
RUN = Run(seconds=30.0, size=2, processors=4, unix_offset=1000.0)
HOW_LONG = 20_000 * MS  # from the start of the engine to the last collective


def run_of(size: int = 2, processors: int = 4, log: str | None = None) -> Run:
    return Run(30.0, size, processors, 1000.0, log)


def rank(number: int = 0, **fields: int | list[int]) -> page.Snapshot:
    """Rank of a healthy run of 20 s and 400 steps of 50 ms, with some fields changed."""
    steps = [0] * page.DURATIONS
    steps[26] = 400
    usual: dict[str, int | list[int]] = {
        "state": 2,
        "pid": 100 + number,
        "rank": number,
        "size": 2,
        "worlds": 1,
        "steps": 400,
        "step_ns": HOW_LONG,
        "step_durations": steps,
        "started_ns": 1010 * 10**9,
        "last_ns": 10 * 10**9 + HOW_LONG,
        "collectives": [100, 100],
        "collective_bytes": [4 << 30, 4 << 30],
        "collective_ns": [2000 * MS],
        "collective_tensors": [1000],
        "exposed_ns": 200 * MS,
        "blocked_ns": 600 * MS,
        "lags": 100,
        "lag_ns": 40 * MS,
        "submitted": 10_000,
        "requests": 30,
        "fused_bytes": 4 << 30,
        "fusion_capacity": 8 << 30,
        "cycles": [5, 80, 10, 5, 0],
        "fusion_threshold": 64 << 20,
        "cycle_time_ns": 5 * MS,
        "chunk": 512 << 10,
        "stores": 2,
    }
    return snapshot(**usual | fields)


def told(run: Run = RUN, **fields: int | list[int]) -> list[str]:
    """Advice for a job both of whose ranks have these fields."""
    return advice.recommend_changes(compute_figures({0: rank(0, **fields), 1: rank(1, **fields)}, run))


def test_a_healthy_run_in_figures() -> None:
    found = compute_figures({0: rank(0), 1: rank(1)}, RUN)
    assert (found.steps, found.step) == (400, 0.05)
    assert found.step_half == found.step_most == (2**25 / 1e9, 2**26 / 1e9)
    assert found.nbytes == 8 << 30 and found.active == 20.0
    assert (found.blocked, found.exposed, found.waited) == (0.03, 0.01, pytest.approx(0.02))
    assert found.hidden == 0.9 and found.fill == 0.5 and found.batch == (8 << 30) / 200
    assert found.straggler is None


def test_the_summary_has_about_ten_lines_and_its_figures() -> None:
    text = advice.summarize_run({0: rank(0), 1: rank(1, lag_ns=100 * 12 * MS)}, RUN)
    assert 9 <= len(text) <= 12
    assert text[0] == "summary: 2 ranks, 0:00:30"
    shown = "\n".join(text)
    for figure in (
        *("400, of 50 ms in the mean", "33.6 ms to 67.1 ms", "8 GiB of tensors", "429 MB/s a rank", "20.0 steps/s"),
        *("blocked for 3.0 %", "1.0 % in collectives", "2.0 % waiting", "90.0 %", "1, 12 ms after the first"),
        *(
            "50.0 % of the threshold",
            "the step was complete 80 %",
            "--fusion-threshold 64M --cycle-time-ms 5 --stores auto",
        ),
    ):
        assert figure in shown, figure


def test_the_summary_is_about_the_tuners_choice_when_it_has_chosen() -> None:
    tuned = rank(0, tuner_phase=3, tuner_trials=21, tuner_default_ps=80 * 10**9, tuner_best_ps=60 * 10**9)
    shown = "\n".join(advice.summarize_run({0: tuned, 1: rank(1)}, RUN))
    assert "21 trials; the knobs above are its choice, 60 ms against 80 ms" in shown and "25.0 % less" in shown


def test_a_search_that_found_nothing_faster_says_so() -> None:
    tuned = rank(0, tuner_phase=3, tuner_trials=19, tuner_default_ps=80 * 10**9, tuner_best_ps=80 * 10**9)
    shown = "\n".join(advice.summarize_run({0: tuned, 1: rank(1)}, RUN))
    assert "19 trials; it found nothing faster than the knobs above" in shown


def test_knobs_of_a_trial_are_not_called_the_best() -> None:
    tuned = rank(0, tuner_phase=2, tuner_trials=4)
    shown = "\n".join(advice.summarize_run({0: tuned, 1: rank(1)}, run_of(log="here/log.jsonl")))
    assert "still searching after 4 trials; 'autotune best here/log.jsonl' has its best knobs" in shown
    assert "its choice" not in shown


def test_ranks_are_compared_with_the_processors_of_their_own_host() -> None:
    def crowded(**hosts: tuple[int, int]) -> str | None:
        run = replace(run_of(sum(ranks for ranks, _ in hosts.values()), 1), hosts=hosts)
        return advice.report_crowded_hosts(compute_figures({0: rank(0), 1: rank(1)}, run))

    assert crowded(a=(1, 1), b=(4, 4)) is None
    few = crowded(a=(1, 1), b=(4, 2), c=(3, 1))
    assert few is not None and few.startswith("4 ranks share 2 processors on b; 3 ranks share 1 processor on c, and so")
    assert few.endswith("start fewer ranks there")


def test_hosts_and_what_the_network_costs_are_told() -> None:
    """A host whose data comes late is named, and no rank is called late for it."""
    far = {"hosts": 3, "network_sent": 3 << 30, "lag_ns": 0}
    ranks: dict[int, Page] = {}
    for number, host in enumerate((0, 1, 2, 0)):
        waits = [4000 * MS * (waited == 1 != host) + MS for waited in range(3)]
        ranks[number] = rank(number, host=host, host_name=words_of(f"node{host}"), crossing_ns=waits, **far)
    shown = "\n".join(advice.summarize_run(ranks, RUN))
    assert "node0 ranks 0, 3; node1 rank 1; node2 rank 2; 3 GiB sent to other hosts by a rank" in shown
    assert "waited for data of node0 0.0 %, node1 20.0 %, node2 0.0 %" in shown
    assert "look at the network of node1 and at its load: the others wait for its data for 20.0 % of the time" in shown
    assert "none stands out" in shown
    assert "hosts:" not in "\n".join(advice.summarize_run({0: rank(0), 1: rank(1)}, RUN))


def test_what_gpus_take_is_told() -> None:
    gpu = {"gpu": 1, "device_entries": 40, "device_bytes": 3 << 30, "device_sampled_bytes": 10**9}
    gpu |= {"device_samples": [4, 2, 4, 0, 10], "device_ns": [4 * MS, 4 * MS, 40 * MS, 0, 30 * MS]}
    shown = "\n".join(advice.summarize_run({0: rank(0, **gpu), 1: rank(1)}, RUN))
    assert "GPUs:" in shown and "3 GiB of tensors a rank" in shown
    assert "in the mean: queue 1 ms, pack 2 ms, NCCL 10 ms; 25.00 GB/s in NCCL" in shown, shown
    assert "a step's stream stood for 3 ms (exposed)" in shown
    assert "GPUs:" not in "\n".join(advice.summarize_run({0: rank(0), 1: rank(1)}, RUN))


@pytest.mark.parametrize(("hosts", "slow"), [(2, (0, 1)), (3, (1, 2))])
def test_a_slow_link_between_two_hosts_is_told(hosts: int, slow: tuple[int, int]) -> None:
    """Two hosts wait for each other, so that neither stands out; a third waits for both."""

    def shown(milliseconds: int) -> str:
        ranks: dict[int, Page] = {}
        for host in range(hosts):
            waits = [milliseconds * MS + host if each in slow and each != host else MS for each in range(hosts)]
            far = {"hosts": hosts, "host": host, "host_name": words_of(f"node{host}")}
            ranks[host] = rank(host, **far, crossing_ns=waits, lag_ns=0)
        return "\n".join(advice.summarize_run(ranks, RUN))

    link = f"the link between node{slow[0]} and node{slow[1]} is slow: each waits for the other's data for 20.0 %"
    assert link in shown(4000) and "look at the network of" not in shown(4000) and "none stands out" in shown(4000)
    assert "is slow" not in shown(1000)


# ---- advice: each rule where its condition holds, and where it just does not -----------------------------------------

SLOW = {"blocked_ns": 4000 * MS}  # 20 % of the time
EXPOSED = SLOW | {"exposed_ns": 3000 * MS}
SMALL = {"collective_bytes": [100 << 20, 100 << 20]}
FULL = {"cycles": [80, 5, 10, 5, 0]}
CLOCK = {"cycles": [5, 10, 5, 80, 0]}
CASES: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = [
    ("the job failed (rank 1 died)", None, {"state": 3, "cause": 1, "culprit": 2}, {"state": 2}),
    ("programs differ", None, {"mismatches": 1}, {"mismatches": 0}),
    ("stood still", None, {"stall_warnings": 1}, {"stall_warnings": 0}),
    ("3 ranks share 2 processors", run_of(3, 2), {}, {}),
    ("with a new name or shape", None, {"requests": 2100}, {"requests": 1900}),
    ("larger --fusion-threshold", None, EXPOSED | SMALL | FULL, EXPOSED | FULL),
    ("larger --fusion-threshold", None, EXPOSED | SMALL | FULL, EXPOSED | SMALL | CLOCK),
    ("larger --fusion-threshold", None, EXPOSED | SMALL | FULL, SMALL | FULL),
    ("lower --cycle-time-ms (it is 5)", None, SLOW | CLOCK, CLOCK),
    ("lower --cycle-time-ms", None, SLOW | CLOCK, SLOW | FULL),
    ("--autotune looks for better knobs", None, SLOW, {"blocked_ns": 1900 * MS}),
    ("--autotune looks for better knobs", None, SLOW, SLOW | {"tuner_phase": 3}),
    ("the tuner had not finished", None, SLOW | {"tuner_phase": 2}, SLOW | {"tuner_phase": 3}),
]


@pytest.mark.parametrize(("words", "run", "so", "not_so"), CASES)
def test_advice_is_given_where_its_condition_holds(words: str, run: Run | None, so: Any, not_so: Any) -> None:
    assert any(words in line for line in told(run or RUN, **so))
    assert not any(words in line for line in told(RUN, **not_so))


def test_one_late_rank_is_named_with_how_late_it_is() -> None:
    found = advice.recommend_changes(compute_figures({0: rank(0), 1: rank(1, lag_ns=100 * 12 * MS)}, RUN))
    assert len(found) == 1 and found[0].startswith(
        "look at rank 1: it submits its tensors 12 ms after the first rank, 24"
    )


def test_of_a_late_rank_the_cause_is_said_where_it_is_known() -> None:
    """The cause of most of its lost time counts; of few late steps none is said."""
    for count, words in ((9, "; its late steps lost most by gc"), (2, "; is its share of the data larger, ")):
        counts = [3 if cause == "input" else count if cause == "gc" else 0 for cause in names.LATE_CAUSES]
        late = rank(1, lag_ns=100 * 12 * MS, late_steps=counts, late_ns=[each * 10 * MS for each in counts])
        (found,) = advice.recommend_changes(compute_figures({0: rank(0), 1: late}, RUN))
        assert words in found


def test_ranks_that_are_late_in_turn_are_not_blamed() -> None:
    found = advice.recommend_changes(compute_figures({n: rank(n, lag_ns=(1000 + n) * MS) for n in range(2)}, RUN))
    assert not any("look at" in line for line in found)


def test_where_nothing_is_to_change_that_is_said() -> None:
    assert told() == ["nothing: communication costs 3.0 % of the time"]


def test_of_few_steps_nothing_is_concluded() -> None:
    few = {"steps": FEW_STEPS - 1, "step_ns": (FEW_STEPS - 1) * 50 * MS, "lag_ns": 100 * 90 * MS}
    found = told(**EXPOSED | SMALL | FULL | few)
    assert found == ["19 steps: at least 20 are needed to judge the knobs by"]


# ---- runs that went wrong --------------------------------------------------------------------------------------------


def test_a_failed_run_is_summarised_up_to_its_end() -> None:
    pages: dict[int, Page] = {0: rank(0, state=3, cause=1, culprit=2), 1: rank(1, state=1), 2: None}
    text = advice.summarize_run(pages, run_of(3))
    assert text[0] == "summary: 3 ranks, 0:00:30; rank 2 never started the engine"
    assert any("rank 0 failed: rank 1 died" in line for line in text)


def test_what_the_user_ended_has_not_failed() -> None:
    pages: dict[int, Page] = {number: rank(number, state=3, cause=2, culprit=1) for number in range(2)}
    text = "\n".join(advice.summarize_run(pages, replace(RUN, ended_by="SIGINT")))
    assert "the user ended the job (SIGINT)" in text and "failed" not in text


def test_a_page_that_cannot_be_read_is_named_and_the_others_are_used() -> None:
    descriptor = page.make()
    os.pwrite(descriptor, b"\xff" * page.BYTES, 0)
    with pytest.raises(page.PageError) as caught:
        page.read(descriptor)
    os.close(descriptor)
    shown = "\n".join(advice.summarize_run({0: rank(0), 1: caught.value}, RUN))
    assert "the page of rank 1 begins with" in shown and "400, of 50 ms" in shown


@pytest.mark.parametrize("pages", [{0: None, 1: None}, {0: rank(0, state=0), 1: None}])
def test_a_run_without_the_engine_says_so(pages: dict[int, Page]) -> None:
    assert advice.summarize_run(pages, RUN)[1] == "  nothing was counted: no rank has started the engine"


def test_a_run_that_did_not_count_says_so() -> None:
    (line,) = advice.summarize_run({}, RUN)
    assert "--no-metrics" in line


def test_a_rank_that_started_and_did_nothing_makes_no_figures_up() -> None:
    text = advice.summarize_run({0: snapshot(state=1, pid=1, size=1, worlds=1, started_ns=1)}, run_of(1))
    shown = "\n".join(text)
    assert "none were counted" in shown and "no collective has moved data" in shown and "%" not in shown


@given(st.lists(st.dictionaries(st.sampled_from(sorted(page.EXPECTED)), st.integers(0, 2**64 - 1)), max_size=4))
def test_whatever_pages_hold_there_is_a_summary(contents: list[dict[str, int]]) -> None:
    text = advice.summarize_run({number: snapshot(**content) for number, content in enumerate(contents)}, RUN)
    assert text and all(line.isprintable() for line in text)


@given(st.lists(st.integers(1, 2**38), min_size=1, max_size=200), st.sampled_from([0.5, 0.95, 1.0]))
def test_a_percentile_lies_between_its_bounds(durations: list[int], share: float) -> None:
    buckets = [0] * page.DURATIONS
    for nanoseconds in durations:
        buckets[min(nanoseconds.bit_length(), page.DURATIONS - 1)] += 1
    bounds = find_percentile(buckets, share)
    assert bounds is not None
    ordered = sorted(durations)
    exact = next(value for index, value in enumerate(ordered) if index + 1 >= share * len(ordered)) / 1e9
    assert bounds[0] <= exact < bounds[1]


def test_of_nothing_there_is_no_percentile() -> None:
    assert find_percentile([0] * page.DURATIONS, 0.5) is None


def test_lines_are_what_the_figures_say() -> None:
    assert format_summary(compute_figures({0: rank(0), 1: rank(1)}, RUN), ["one", "two"])[-2:] == [
        "  to change:      one",
        "                  two",
    ]
