"""Late steps: the rule by which a rank judges its own, what is counted, and who is told."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from engine.data import time_input
from engine.metrics import names
from engine.metrics.report.late_steps import collect_late_steps, describe_late_steps
from engine_ext.snapshots import judge_steps

from ..netns import Hosts, lacking
from ..ranks import run_ranks
from ..waiting import measured
from . import delayed_steps, late_program
from .written_pages import snapshot

MS = 1_000_000
PARTS = ("input", "compute", "gc", "cpu", "wait")


def usual(**more: Any) -> dict[str, Any]:
    """A step of 20 ms, longer by what is given."""
    step = {"input": MS, "compute": 12 * MS, "gc": MS // 2, "cpu": MS // 2, "wait": 6 * MS, "others_late": MS}
    step["rank"] = 1
    for name, value in more.items():
        step[name] = step[name] + value if name in (*PARTS, "others_late") else value
    return step


def judge(last: dict[str, Any], before: int = 40) -> dict[str, Any] | None:
    """Judge a step after a number of usual ones, none of which is late."""
    *found, late = judge_steps([*[usual()] * before, last])
    assert found == [None] * before
    return late


# ---- the rule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cause", ["input", "compute", "gc", "cpu"])
def test_late_step_is_due_to_the_part_that_is_beyond_its_usual_length(cause: str) -> None:
    late = judge(usual(**{cause: 10 * MS}))
    assert late is not None
    assert (late["cause"], late["rank"], late["late"]) == (cause, None, 10 * MS)
    assert late[cause] == usual()[cause] + 10 * MS


def test_long_part_is_no_cause_while_it_is_as_long_as_ever() -> None:
    late = judge(usual(gc=3 * MS))  # compute takes four times as long, as in every step
    assert late is not None and late["cause"] == "gc"


@pytest.mark.parametrize("far", [False, True])
def test_rank_that_waits_names_the_rank_that_was_late(far: bool) -> None:
    late = judge(usual(wait=10 * MS, others_late=9 * MS, rank=3, far=far))
    assert late is not None and (late["cause"], late["rank"]) == ("rank", 3)


def test_wait_for_data_is_the_network_while_nobody_is_late() -> None:
    late = judge(usual(wait=10 * MS, others_late=MS, rank=3, far=True))
    assert late is not None and (late["cause"], late["rank"]) == ("network", None)
    late = judge(usual(wait=10 * MS, others_late=MS, rank=3))
    assert late is not None and (late["cause"], late["rank"]) == ("rank", None)  # not known which


def test_wait_of_which_nothing_is_known_is_not_the_networks() -> None:
    late = judge(usual(wait=10 * MS, others_late=MS, rank=-1))
    assert late is not None and (late["cause"], late["rank"]) == ("rank", None)


def test_lateness_counts_beyond_its_usual_length_alone() -> None:
    """A rank that is last in every step by 9 ms has not made this step late."""
    steps = [usual(others_late=9 * MS, rank=3, far=True)] * 40
    late = judge_steps([*steps, usual(wait=10 * MS, others_late=9 * MS, rank=3, far=True)])[-1]
    assert late is not None and late["cause"] == "network"


@pytest.mark.parametrize("where", ["device", "elsewhere"])
def test_tensors_on_a_gpu_and_of_other_threads_are_waited_for_outside_the_engine(where: str) -> None:
    late = judge(usual(compute=10 * MS, others_late=9 * MS, rank=2, **{where: True}))
    assert late is not None and (late["cause"], late["rank"]) == ("rank", 2)
    late = judge(usual(compute=10 * MS, others_late=9 * MS, rank=2))
    assert late is not None and late["cause"] == "compute"


def test_shorter_wait_does_not_hide_the_cause() -> None:
    late = judge(usual(input=10 * MS, wait=-5 * MS))
    assert late is not None and (late["cause"], late["late"]) == ("input", 5 * MS)


@pytest.mark.parametrize(("more", "is_late"), [(MS, False), (2 * MS, False), (2 * MS + 1000, True)])
def test_steady_step_is_late_from_a_tenth_of_the_median(more: int, is_late: bool) -> None:
    assert (judge(usual(compute=more)) is not None) == is_late


@pytest.mark.parametrize(("more", "is_late"), [(400_000, False), (500_000, False), (501_000, True)])
def test_short_step_is_late_from_half_a_millisecond(more: int, is_late: bool) -> None:
    steps = [{"compute": MS}] * 40
    assert (judge_steps([*steps, {"compute": MS + more}])[-1] is not None) == is_late


def test_step_is_late_beyond_twice_the_spread() -> None:
    draw = random.Random(5)
    steps = [usual(compute=draw.randrange(-4 * MS, 4 * MS)) for _ in range(64)]  # quartiles about 4 ms apart
    for more, is_late in ((6 * MS, False), (12 * MS, True)):
        *_, late = judge_steps([*steps, usual(compute=more)])
        assert (late is not None) == is_late


def test_first_steps_are_not_judged() -> None:
    found = judge_steps([usual(compute=k * 100 * MS) for k in range(16)])
    assert found == [None] * 16
    assert judge(usual(input=50 * MS), before=15) is None
    assert judge(usual(input=50 * MS), before=16) is not None


def test_new_pace_is_usual_after_half_a_window() -> None:
    found = judge_steps([usual()] * 64 + [usual(compute=20 * MS)] * 64)
    late = [k for k, each in enumerate(found) if each is not None]
    assert late == list(range(64, 64 + len(late))) and len(late) == 32


def test_window_holds_the_last_64_steps_in_order() -> None:
    """The same verdicts as by medians and quartiles that are computed anew for each step."""
    draw = random.Random(7)
    lengths = [draw.choice([MS, 2 * MS, 3 * MS, 40 * MS]) + draw.randrange(MS) for _ in range(500)]
    found = judge_steps([{"compute": length} for length in lengths])
    for k, late in enumerate(found):
        seen = sorted(lengths[max(0, k - 64) : k])
        if k < 16:
            assert late is None
            continue
        low, middle, high = (seen[len(seen) * quarter // 4] for quarter in (1, 2, 3))
        bar = max(500_000, middle // 10, 2 * min(high - low, 3 * (middle - low)))
        excess = lengths[k] - middle
        assert (late["late"] if late is not None else None) == (excess if excess > bar else None)


# ---- in a job --------------------------------------------------------------------------------------------------------


def expect_right(kinds: Sequence[str], hosts: Hosts | None, delays: int = 20) -> None:
    """Delay steps, and expect that 95 % of the verdicts are right; of few delays 80 %, as other tests run beside."""
    share = 0.95 if delays >= 200 else 0.8

    def measure() -> None:
        plan = delayed_steps.plan_delays(delays, kinds, 11)
        outcome = delayed_steps.judge_delays(plan, delayed_steps.run_delays(plan, hosts))
        table = "\n".join(delayed_steps.format_confusion(outcome, kinds))
        assert outcome.total == delays
        assert outcome.right >= share * delays, f"{table}\n{outcome}"

    measured(measure, 4)


@pytest.mark.sample(1)
def test_delays_on_one_host_get_their_cause_and_their_rank() -> None:
    kinds = [kind for kind in delayed_steps.KINDS if kind != "network"]
    if not delayed_steps.can_steal():
        kinds.remove("cpu")
    expect_right(kinds, None)


@pytest.mark.sample(1)
@pytest.mark.parametrize("delays", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_delays_on_two_hosts_get_their_cause_and_their_rank(delays: int) -> None:
    if reason := lacking():
        pytest.skip(reason)
    if not delayed_steps.can_steal():
        pytest.skip("each rank needs a processor, and this process the right to take it away by SCHED_FIFO")
    with Hosts(2) as hosts:
        expect_right(delayed_steps.KINDS, hosts, delays)


def test_late_steps_are_counted_on_both_ranks_and_shown() -> None:
    def measure() -> None:
        late, waiting = run_ranks(2, late_program.delay_input, 0.1, 5).values
        assert late["input"] >= 4, late
        assert waiting["rank"] >= 4 and waiting["input"] == 0, waiting
        assert late["rank"] < waiting["rank"], (late, waiting)
        for found, cause, least in ((late, "input", 0.09e6), (waiting, "rank", 0.05e6)):
            drawn = [event for event in found["drawn"] if event["name"] == f"late: {cause}"]
            assert len(drawn) == found[cause] and found["notes"] == [] and found["read"] >= 55
            assert all(event["args"].get("rank") == (None if cause == "input" else 0) for event in drawn)
            assert sum(event["args"]["late_us"] > least for event in drawn) >= 4
            parts = [[event["args"][f"{part}_us"] for part in PARTS] for event in drawn]
            assert all(abs(sum(each) - event["dur"]) < 100 for each, event in zip(parts, drawn, strict=True))

    measured(measure, 8)  # 0.1 s is little beside what a busy machine does


def test_nothing_is_clocked_while_nothing_is_counted() -> None:
    for found in run_ranks(2, late_program.look_while_off).values:
        assert found == {"late": [], "callbacks": 0, "clocked": False, "after": 1, "end": 0}


def test_other_threads_and_nested_loaders_do_not_confuse_the_clock() -> None:
    left = []

    def measure() -> None:
        for found in run_ranks(2, late_program.use_threads).values:
            left.append(found["left"])
            assert found["late"] >= 1 and found["causes"] == ["input"], found

    measured(measure)
    assert set(left) == {0}


def test_forked_child_has_no_file_of_the_clock() -> None:
    for found in run_ranks(2, late_program.fork_a_child).values:
        assert found == {"rank": 1, "child": 0, "after": 1}


def test_steps_of_a_process_set_are_not_mixed_with_the_worlds() -> None:
    def measure() -> None:
        for found in run_ranks(3, late_program.mark_in_turn).values:
            assert found["late"] == [39], found

    measured(measure)


def test_threads_that_mark_in_turn_are_clocked_again_when_one_goes_on_alone() -> None:
    """More threads than the budget of looks, each new one in the place of the last."""
    files = []

    def measure() -> None:
        for found in run_ranks(2, late_program.change_threads).values:
            files.append(found["files"])
            assert found["causes"] == ["input"], found

    measured(measure)
    assert max(files) <= 1


def test_loaders_of_torch_are_timed_without_a_change() -> None:
    pytest.importorskip("torch")

    def measure() -> None:
        for found in run_ranks(2, late_program.train_torch).values:
            assert found["restored"] == found["batches"]
        assert found["late"][0] == ["input"] or found["late"][1] == ["input"], found

    measured(measure)


# ---- the timer of input ----------------------------------------------------------------------------------------------


class Loader(list[int]):
    """A loader with an attribute of its own."""

    epoch = 3


def test_timed_loader_is_like_the_loader() -> None:
    loader = time_input(Loader([1, 2, 3]))
    assert list(loader) == [1, 2, 3] == list(loader)
    assert len(loader) == 3  # type: ignore[arg-type]
    assert loader.epoch == 3  # type: ignore[attr-defined]
    loader.epoch = 4  # type: ignore[attr-defined]
    assert loader._loader.epoch == 4 and bool(loader)  # type: ignore[attr-defined]
    assert not time_input([]) and time_input(iter([]))
    with pytest.raises(AttributeError):
        _ = loader.missing  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        len(time_input(iter([1])))  # type: ignore[arg-type]


def test_timed_loader_passes_errors_on() -> None:
    def load() -> Any:
        yield 1
        raise OSError("the disk is gone")

    batches = iter(time_input(load()))
    assert next(batches) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)


# ---- reports ---------------------------------------------------------------------------------------------------------


def make_pages(*late: dict[str, int]) -> dict[int, Any]:
    """Pages of ranks with late steps of 10 ms each, by cause."""
    found = {}
    for rank, steps in enumerate(late):
        counts = [steps.get(cause, 0) for cause in names.LATE_CAUSES]
        found[rank] = snapshot(
            state=1,
            rank=rank,
            steps=100,
            late_steps=counts,
            late_ns=[count * 10 * MS for count in counts],
        )
    return found


def test_report_names_the_ranks_that_cost_most_with_their_causes() -> None:
    pages = make_pages({"rank": 12}, {"input": 9, "rank": 3}, {"gc": 2, "cpu": 1})
    late = collect_late_steps(pages)
    assert [late[rank].waited for rank in range(3)] == [12, 3, 0]
    assert describe_late_steps(late) == "rank 1 9 by input (90 ms); rank 2 2 by gc (20 ms), 1 by cpu (10 ms)"


def test_report_of_many_ranks_counts_the_rest() -> None:
    pages = make_pages(*[{"compute": 5 - rank} for rank in range(5)])
    described = describe_late_steps(collect_late_steps(pages))
    assert described is not None and described.endswith("; 3 more on 2 other ranks")


def test_report_without_late_steps_is_empty() -> None:
    assert describe_late_steps(collect_late_steps(make_pages({}, {}))) is None
    waiting = describe_late_steps(collect_late_steps(make_pages({"rank": 2}, {})))
    assert waiting == "rank 0 waited, and no rank was late by itself"


def test_report_says_on_which_ranks_waits_for_a_processor_are_not_known() -> None:
    pages = make_pages({"gc": 1}, {"compute": 2})
    pages[1].fields["late_blind"][0] = 1
    described = describe_late_steps(collect_late_steps(pages))
    assert described is not None and described.endswith("; waits for a processor are not known on rank 1")
