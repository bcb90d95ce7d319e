"""Predictions for more hosts: laws of the model on drawn steps, figures computed by hand, broken files."""

from __future__ import annotations

import json
import math
import operator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config.forms import bit_rate, short_time
from engine.foresee.command import main
from engine.foresee.model import (
    IDEAL,
    Batch,
    Network,
    Rules,
    Step,
    Tensor,
    chain_share,
    direct_share,
    fuse_tensors,
    goes_by_chain,
    is_one_shot,
    predict,
)
from engine.foresee.recorded import choose_steps
from engine.foresee.variants import (
    LocalSteps,
    compress_step,
    find_gradients,
    predict_local_steps,
    unroll_local_steps,
)
from engine.launch.cli import main as enginerun
from engine.trace.reading import TraceError, read

from .test_trace_reading import head, in_a_set, slice_, tensor, write

RULES = Rules(1 << 20, 5e-3, 1 << 16)
LINK = Network(1e9, 1e-4)
LIST = ["--hosts", "2,8", "--bandwidth", "1G", "--latency", "100us"]
DRAWN = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
KINDS = ("allreduce", "allreduce", "allreduce", "broadcast", "allgather", "reducescatter", "alltoall", "barrier")


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Strategy of steps: tensors that become ready one after another in 100 ms, disjoint waits, and ordered entries."""
    moments = sorted(draw(st.lists(st.floats(0, 0.09), min_size=1, max_size=30)))
    tensors, free = [], 0.0
    for ready in moments:
        started = max(ready, free) + draw(st.floats(0, 1e-3))
        free = started + draw(st.floats(0, 2e-3))
        kind = draw(st.sampled_from(KINDS))
        tensors.append(Tensor(ready, started, free, draw(st.integers(0, 1 << 22)), kind))
    edges = sorted(draw(st.lists(st.floats(0, 0.2), max_size=8)))
    waits = tuple(zip(edges[::2], edges[1::2], strict=False))
    return Step(0.2, tuple(tensors), waits)


rules = st.builds(
    Rules,
    st.sampled_from([0, 1 << 16, 1 << 26]),
    st.sampled_from([0.0, 1e-3, 1e-2]),
    st.just(1 << 19),
    st.sampled_from(["auto", "direct", "chain"]),
)
networks = st.builds(Network, st.floats(1e6, 1e12), st.floats(0, 1e-2))


@DRAWN
@given(steps(), rules, st.integers(1, 300), st.integers(1, 8))
def test_a_network_that_costs_nothing_gives_the_recorded_step(
    step: Step, chosen: Rules, hosts: int, ranks: int
) -> None:
    assert predict(step, chosen, hosts, IDEAL, ranks).seconds == step.seconds


@DRAWN
@given(steps(), rules, networks)
def test_one_host_needs_no_network(step: Step, chosen: Rules, network: Network) -> None:
    one = predict(step, chosen, 1, network)
    assert (one.seconds, one.busy, one.nbytes) == (step.seconds, 0.0, 0.0)


@DRAWN
@given(steps(), rules, networks, st.integers(1, 300), st.integers(1, 8), st.floats(1, 100), st.integers(0, 300))
def test_a_step_is_no_shorter_with_a_slower_network_or_more_hosts(
    step: Step, chosen: Rules, network: Network, hosts: int, ranks: int, factor: float, more: int
) -> None:
    """Except where more hosts turn a chain, or one exchange, into a direct one, which may be shorter."""
    seconds = predict(step, chosen, hosts, network, ranks).seconds
    slower = replace(network, bandwidth=network.bandwidth / factor)
    later = replace(network, latency=network.latency * factor)
    rounding = 1e-9
    assert step.seconds <= seconds
    assert predict(step, chosen, hosts, slower, ranks).seconds >= seconds - rounding
    assert predict(step, chosen, hosts, later, ranks).seconds >= seconds - rounding
    one_shot = any(is_one_shot(batch, hosts, ranks) for batch in fuse_tensors(step, chosen))
    if chosen.between_hosts != "auto" and not one_shot:
        assert predict(step, chosen, hosts + more, network, ranks).seconds >= seconds - rounding


@DRAWN
@given(steps(), rules, networks, st.integers(2, 300), st.integers(1, 8))
def test_a_link_carries_no_more_than_it_can(
    step: Step, chosen: Rules, network: Network, hosts: int, ranks: int
) -> None:
    foreseen = predict(step, chosen, hosts, network, ranks)
    assert foreseen.busy == pytest.approx(8 * foreseen.nbytes / network.bandwidth)
    chains = [goes_by_chain(batch, chosen, hosts, ranks) for batch in fuse_tensors(step, chosen)]
    shares = [
        chain_share(hosts) if chain else direct_share(batch, hosts, ranks)
        for chain, batch in zip(chains, fuse_tensors(step, chosen), strict=True)
    ]
    sizes = [batch.nbytes for batch in fuse_tensors(step, chosen)]
    assert foreseen.nbytes == pytest.approx(sum(map(operator.mul, sizes, shares)))
    if chosen.between_hosts == "auto":
        direct = replace(chosen, between_hosts="direct")
        assert foreseen.nbytes <= predict(step, direct, hosts, network, ranks).nbytes * (1 + 1e-9)


@DRAWN
@given(steps(), rules)
def test_fusion_loses_nothing_and_keeps_to_the_threshold(step: Step, chosen: Rules) -> None:
    batches = fuse_tensors(step, chosen)
    assert sum(batch.nbytes for batch in batches) == sum(tensor.nbytes for tensor in step.tensors)
    assert [batch.closed for batch in batches] == sorted(batch.closed for batch in batches)
    largest = max(tensor.nbytes for tensor in step.tensors)
    assert all(batch.nbytes <= max(chosen.fusion_threshold, largest) for batch in batches)
    assert all(batch.closed <= batch.started <= batch.ended for batch in batches)


def ready(*moments: float, nbytes: int = 1000, **more: Any) -> tuple[Tensor, ...]:
    return tuple(Tensor(moment, moment, moment, nbytes, **more) for moment in moments)


@pytest.mark.parametrize(
    ("tensors", "waits", "chosen", "closed"),
    [
        (ready(0.010, 0.012, 0.014), (), RULES, [(0.014, 3000)]),  # closed by the step's last tensor
        (ready(0.010, 0.012, 0.030), (), RULES, [(0.015, 2000), (0.030, 1000)]),  # the cycle time
        (ready(0.010, 0.012, 0.014), (), replace(RULES, fusion_threshold=2000), [(0.012, 2000), (0.014, 1000)]),
        (ready(0.010, 0.012), (), replace(RULES, fusion_threshold=0), [(0.010, 1000), (0.012, 1000)]),
        (ready(0.010, 0.014), ((0.011, 0.012),), RULES, [(0.011, 1000), (0.014, 1000)]),  # closed by a waiter
        (ready(0.010, 0.012, 0.014), ((0.011, 0.013),), RULES, [(0.012, 2000), (0.014, 1000)]),  # for a later tensor
        (ready(0.010) + ready(0.011, kind="broadcast"), (), RULES, [(0.011, 1000), (0.011, 1000)]),
        (ready(0.010) + ready(0.011, compression="fp16"), (), RULES, [(0.011, 1000), (0.011, 1000)]),
    ],
)
def test_when_batches_close(
    tensors: tuple[Tensor, ...], waits: tuple[Any, ...], chosen: Rules, closed: list[tuple[float, float]]
) -> None:
    assert [(b.closed, b.nbytes) for b in fuse_tensors(Step(0.1, tensors, waits), chosen)] == closed


def test_what_one_allreduce_costs() -> None:
    """1 MB in 16 chunks over 1 Gbit/s takes 8 ms on two hosts, and four trips of 0.1 ms, all after backward."""
    one = Step(0.1, (Tensor(0.090, 0.090, 0.090, 1e6),), ((0.090, 0.0901),))
    added = predict(one, RULES, 2, LINK).seconds - 0.1
    assert added == pytest.approx(8e-3 + 4e-4 - 1e-4)
    assert predict(one, RULES, 4, LINK).nbytes == 1.5e6
    # With three ranks on each host: two parts to each remote rank, and three sums.
    assert predict(one, RULES, 2, LINK, 3).nbytes == 2e6


def test_what_one_allreduce_costs_along_a_chain() -> None:
    """8 MiB with four ranks per host: 67 ms once at 1 Gbit/s, and the rounds in which hosts have nothing to do yet."""
    one = Step(0.1, (Tensor(0.090, 0.090, 0.090, 1 << 23),), ((0.090, 0.0901),))
    chosen = replace(RULES, chunk_bytes=1 << 19)
    fast = Network(1e9, 0.0)
    once = 8e-9 * (1 << 23)
    two = predict(one, chosen, 2, fast, 4)
    assert two.nbytes == 1 << 23
    assert two.seconds - 0.1 == pytest.approx(once * (1 + 4 / 16) - 1e-4)
    # Four hosts, six legs, 24 chunks: hosts in the middle send sums and results, 16 rounds long both at once.
    four = predict(one, chosen, 4, fast, 4)
    assert four.nbytes == 2 << 23
    assert four.seconds - 0.1 == pytest.approx(once * (16 * 2 + 24 + 12 - 16) / 24 - 1e-4, rel=0.02)
    # At high latency each round takes half a trip; a direct exchange carries 2.5 times as much.
    assert predict(one, chosen, 2, Network(math.inf, 10e-3), 4).seconds - 0.1 == pytest.approx(
        2 * 10e-3 + (16 + 4) * 5e-3 - 1e-4
    )
    assert predict(one, replace(chosen, between_hosts="direct"), 2, fast, 4).nbytes == 2.5 * (1 << 23)


@pytest.mark.parametrize(
    ("mebibytes", "compression", "hosts", "ranks", "between", "chain"),
    [
        (2, "none", 2, 2, "auto", True),
        (2, "none", 2, 1, "auto", False),  # saves no bytes
        (1, "none", 2, 2, "auto", False),  # too small
        (3, "none", 3, 4, "auto", False),
        (4, "none", 3, 4, "auto", True),
        (4, "fp16", 3, 3, "auto", False),  # sums of 16 bits travel as float32
        (4, "fp16", 3, 4, "auto", True),
        (4, "fp8", 3, 4, "chain", False),
        (2, "none", 2, 2, "direct", False),
        (1, "none", 2, 1, "chain", True),
    ],
)
def test_which_allreduces_go_along_a_chain(
    mebibytes: int, compression: str, hosts: int, ranks: int, between: str, chain: bool
) -> None:
    batch = Batch(0.0, 0.0, 0.0, mebibytes << 20, "allreduce", compression)
    assert goes_by_chain(batch, replace(RULES, between_hosts=between), hosts, ranks) == chain


def test_what_passes_while_the_program_computes_costs_nothing() -> None:
    tensors = (Tensor(0.010, 0.010, 0.011, 1e6), Tensor(0.090, 0.090, 0.091, 1000))
    hidden = predict(Step(0.1, tensors, ((0.090, 0.0911),)), RULES, 2, LINK).seconds - 0.1
    assert hidden < 1e-3
    # The same allreduce, awaited by the program at once.
    assert predict(Step(0.1, tensors, ((0.010, 0.0111), (0.090, 0.0911))), RULES, 2, LINK).seconds - 0.1 > 7e-3


def test_what_is_done_after_the_end_of_a_step_counts_too() -> None:
    beyond = Step(0.1, (Tensor(0.099, 0.099, 0.101, 1e6),), ())
    assert predict(beyond, RULES, 2, LINK).seconds - 0.1 == pytest.approx(8e-3 + 4e-4 - 2e-3 * 15 / 16)


def test_a_long_way_bounds_how_many_chunks_are_under_way() -> None:
    """100 chunks in windows of 4, each a round of two trips: the link is idle most of the time."""
    far = Network(math.inf, 10e-3)
    one = Step(0.1, (Tensor(0.05, 0.05, 0.05, 100 * RULES.chunk_bytes),), ((0.05, 0.05),))
    assert predict(one, RULES, 2, far).seconds - 0.1 == pytest.approx(2 * 10e-3 + 99 * 20e-3 / 4 + 20e-3)


def test_a_batch_has_what_its_tensors_have() -> None:
    tensors = (Tensor(0.01, 0.02, 0.03, 10), Tensor(0.012, 0.02, 0.04, 20))
    assert fuse_tensors(Step(0.1, tensors, ()), RULES) == [
        Batch(0.012, 0.02, 0.04, 30, "allreduce", due=0.04, work=0.02)
    ]


def test_waits_for_late_ranks_of_the_host_pass_while_bytes_travel() -> None:
    """An entry takes 10 ms in the host, 2 ms of it work. Two chunks of 8 ms begin after half of that."""
    one = Tensor(0.080, 0.090, 0.100, 2e6, work=0.002)
    added = predict(Step(0.1, (one,), ((0.090, 0.100),)), replace(RULES, chunk_bytes=1 << 20), 2, LINK).seconds - 0.1
    assert added == pytest.approx(0.001 + 2 * 8e-3 + 2e-4 - 0.010)


def test_a_small_allreduce_is_one_exchange() -> None:
    """8 KiB of two hosts with two ranks each are 32 KiB, which each rank sends to the other host at once."""
    one = Step(0.1, (Tensor(0.090, 0.090, 0.090, 1 << 13),), ((0.090, 0.0901),))
    assert predict(one, RULES, 2, LINK, 2).nbytes == 2 << 13
    assert predict(one, RULES, 2, LINK, 2).seconds - 0.1 == pytest.approx(8e-9 * (2 << 13) + 3e-4 - 1e-4)
    larger = replace(one, tensors=(replace(one.tensors[0], nbytes=(1 << 13) + 4),))
    assert predict(larger, RULES, 2, LINK, 2).nbytes == pytest.approx(1.5 * ((1 << 13) + 4))
    # As fp8 it is one exchange of float32 up to the same number of elements.
    assert predict(compress_step(one, "fp8"), RULES, 2, LINK, 2).nbytes == 2 << 13
    assert predict(compress_step(larger, "fp8"), RULES, 2, LINK, 2).nbytes == pytest.approx(65 / 256 * ((1 << 13) + 4))


# ---- another compression, and local steps ---------------------------------------------------------------------------

large = st.builds(
    Tensor,
    st.floats(0, 0.09),
    st.just(0.09),
    st.just(0.09),
    st.integers(1 << 18, 1 << 22).map(lambda count: 4 * count),
    dtype=st.sampled_from(["float32", "float32", "float64"]),
)
"""Gradients that are too large for one exchange."""
large_steps = st.builds(
    lambda tensors, waited: Step(0.1, tuple(tensors), ((0.09, 0.09 + waited),)),
    st.lists(large, min_size=1, max_size=20),
    st.floats(0, 0.01),
)


@st.composite
def local_options(draw: st.DrawFn, gradients: int) -> LocalSteps:
    every = draw(st.integers(1, 12))
    return LocalSteps(every, draw(st.integers(1, min(every, gradients))), draw(st.integers(0, every - 1)))


@DRAWN
@given(large_steps, rules, networks, st.integers(2, 64), st.integers(1, 8))
def test_compressed_gradients_move_fewer_bytes(
    step: Step, chosen: Rules, network: Network, hosts: int, ranks: int
) -> None:
    direct = replace(chosen, between_hosts="direct")
    sent = {
        wire: predict(compress_step(step, wire), direct, hosts, network, ranks).nbytes
        for wire in ("none", "fp16", "bf16", "fp8")
    }
    assert sent["fp8"] < sent["fp16"] == sent["bf16"] <= sent["none"] / 2
    assert compress_step(compress_step(step, "fp16"), "none") == step == compress_step(step, "none")


@DRAWN
@given(st.data(), large_steps, rules, networks, st.integers(2, 64), st.sampled_from(["none", "bf16", "fp8"]))
def test_local_steps_divide_the_bytes_and_are_no_shorter_with_a_slower_network(
    data: st.DataObject, step: Step, chosen: Rules, network: Network, hosts: int, wire: str
) -> None:
    step = replace(step, tensors=tuple(replace(each, dtype="float32") for each in step.tensors))
    local = data.draw(local_options(len(step.tensors)))
    direct = replace(chosen, between_hosts="direct")
    found = predict_local_steps(step, local, wire, direct, hosts, network)
    gradients = predict(compress_step(step, wire), direct, hosts, network)
    assert found.nbytes == pytest.approx(gradients.nbytes / local.every)
    assert found.seconds >= step.seconds - 1e-9
    slower = replace(network, bandwidth=network.bandwidth / data.draw(st.floats(1, 100)))
    assert predict_local_steps(step, local, wire, direct, hosts, slower).seconds >= found.seconds - 1e-9
    assert predict_local_steps(step, local, wire, direct, 1, network).seconds == pytest.approx(step.seconds)
    assert predict_local_steps(step, local, wire, direct, hosts, IDEAL).seconds == pytest.approx(step.seconds)


def local_step(*sizes: int, dtype: str = "float32") -> Step:
    tensors = tuple(Tensor(0.09, 0.09, 0.091, size, dtype=dtype) for size in sizes)
    return Step(0.1, tensors, ((0.09, 0.091),))


def test_what_local_steps_cost() -> None:
    """1 MB takes 8 ms and four trips of 0.1 ms once in four steps, unless it travels while the next ones compute."""
    step = local_step(10**6)
    assert predict_local_steps(step, LocalSteps(4), "none", RULES, 2, LINK).seconds == pytest.approx(0.1 + 8.4e-3 / 4)
    assert predict_local_steps(step, LocalSteps(4, delay=1), "none", RULES, 2, LINK).seconds == pytest.approx(0.1)
    # Over 10 Mbit/s it takes 0.8 s, of which two steps of 0.1 s are computed meanwhile.
    slow = Network(1e7, 0.0)
    assert predict_local_steps(step, LocalSteps(4, delay=2), "none", RULES, 2, slow).seconds == pytest.approx(
        0.1 + 0.6 / 4, rel=0.01
    )


def test_fragments_travel_one_after_another_over_a_slow_link() -> None:
    """A link that is always busy bounds the steps: 0.8 s for each four steps, however they are cut."""
    step = local_step(500_000, 300_000, 200_000)
    slow = Network(1e7, 0.0)
    for local in (LocalSteps(4, 2, 1), LocalSteps(4, 2, 3), LocalSteps(4, 3, 3)):
        assert 0.2 * 0.9 <= predict_local_steps(step, local, "none", RULES, 2, slow).seconds <= 0.3
    unrolled, count = unroll_local_steps(step, LocalSteps(4, 2, 1), "none")
    assert (count, unrolled.waits[:2]) == (40, (pytest.approx((0.3, 0.3)), pytest.approx((0.5, 0.5))))
    assert [tensor.nbytes for tensor in unrolled.tensors[:3]] == [300_000, 200_000, 500_000]


def test_a_fragment_that_is_needed_later_is_not_waited_for() -> None:
    """Each of two fragments takes 0.15 s of the 0.3 s until it is needed; one is needed while the other travels."""
    halves = local_step(187_500, 187_500)
    found = predict_local_steps(halves, LocalSteps(4, 2, 3), "none", RULES, 2, Network(1e7, 0.0))
    assert found.seconds == pytest.approx(0.1)


def test_outer_gradients_are_float32_or_wider() -> None:
    for dtype, nbytes in (("bfloat16", 2000), ("float32", 1000), ("float64", 1000)):
        unrolled, _ = unroll_local_steps(local_step(1000, dtype=dtype), LocalSteps(1), "none")
        assert unrolled.tensors[0].nbytes == nbytes
    coded, _ = unroll_local_steps(local_step(1000, dtype="bfloat16"), LocalSteps(1), "fp8")
    assert (coded.tensors[0].nbytes, coded.tensors[0].compression) == (500, "fp8")


def test_which_tensors_are_compressed() -> None:
    def compressed(wire: str, **more: Any) -> tuple[float, str]:
        (tensor,) = compress_step(Step(0.1, ready(0.01, **more), ()), wire).tensors
        return tensor.nbytes, tensor.compression

    assert compressed("fp16", dtype="bfloat16") == (1000, "none")
    assert compressed("fp8", dtype="bfloat16") == (500, "fp8")
    assert compressed("bf16", dtype="float64") == (250, "bf16")
    assert compressed("bf16", dtype="int64") == compressed("bf16", kind="broadcast") == (1000, "none")
    assert compressed("bf16", kind="reducescatter") == (500, "bf16")
    assert compressed("fp8", compression="fp16") == (500, "fp8")
    assert find_gradients(Step(0.1, (*ready(0.01, dtype="int64"), *ready(0.02, kind="allgather")), ())) == []


# ---- from files -----------------------------------------------------------------------------------------------------


def timeline(rank: int, waited_ms: float = 5, count: int = 5, entry: Any = None, **told: Any) -> list[dict[str, Any]]:
    """Steps of 100 ms with a tensor of 400 bytes that travels as 200, ready at 80 ms and awaited until 90 ms."""
    about = head(rank)
    about["args"] |= told
    events = [about, {"ph": "M", "pid": rank, "tid": 17, "name": "thread_name", "args": {"name": "a"}}]
    for number in range(count):
        at = 100.0 * number
        events += [
            slice_(rank, 1, "step", at, at + 100),
            slice_(rank, 2, "wait", at + 90 - waited_ms, at + 90),
            slice_(rank, 3, "allreduce", at + 82, at + 90, entry=number, tensors=1, bytes=200, **(entry or {})),
            *tensor(rank, 17, number, [at + 79, at + 80, at + 82, at + 90], 1, 4),
        ]
    return events


def test_the_steps_of_the_rank_that_waited_least(tmp_path: Path) -> None:
    knobs = {"fusion_threshold": 123, "cycle_time_ms": 2.0, "chunk_bytes": 4096, "stores": "auto"}
    files = [
        write(tmp_path / f"t.rank{rank}.json", timeline(rank, 9 - 4 * rank, engine_knobs=knobs)) for rank in (0, 1)
    ]
    told = choose_steps(read(files, []))
    assert (told.rank, told.ranks, told.of, told.entries, told.notes) == (1, 2, 4, 1.0, ())
    assert told.rules == Rules(123, 2e-3, 4096)
    assert len(told.steps) == 4  # The first includes the start of the program.
    (only,) = told.steps[0].tensors
    times = (told.steps[0].seconds, *told.steps[0].waits[0], only.ready, only.started, only.ended, only.nbytes)
    assert times == pytest.approx((0.1, 0.085, 0.090, 0.080, 0.082, 0.090, 200))


def test_steps_that_lack_entries_are_left_out_and_what_is_not_known_is_said(tmp_path: Path) -> None:
    thin = [event for event in timeline(0) if event.get("args", {}).get("entry") not in (2, 3)]
    told = choose_steps(read([write(tmp_path / "t.json", [*thin, *in_a_set(0, 1, [0, 1])])], []))
    assert (len(told.steps), told.of) == (2, 4)
    assert told.notes == (
        "the timeline does not tell its knobs: the defaults are assumed",
        "what process sets have moved is left out",
    )


def test_the_table_the_json_and_the_picture_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "t.json", timeline(0, 5, engine_knobs={"fusion_threshold": 1 << 20}))
    drawn = tmp_path / "t.svg"
    assert enginerun(["foresee", str(path), *LIST, "--picture", str(drawn)]) == 0
    shown, errors = capsys.readouterr()
    assert str(drawn) in errors and max(map(len, shown.splitlines())) <= 130
    assert "no late hosts" in shown and "(L+1) S (H-1)/H" in shown and "1 Gbit/s, 100 us one way" in shown
    assert main([str(path), *LIST, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["hosts"] for row in told["hosts"]] == [1, 2, 8]
    bars = "".join(ElementTree.parse(drawn).getroot().itertext())
    for row in told["hosts"]:
        assert f"{1e3 * row['step']:.2f} ms" in shown and f"{100 * row['efficiency']:.1f} %" in bars
        assert row["efficiency"] == pytest.approx(0.1 / row["step"])
    # The two trips of control fit into the time that the tensor was queued; its bytes of two ranks take one more.
    assert told["hosts"][1]["step"] == pytest.approx(0.1 + 1e-4 + 8 * 400 / 1e9)


def test_a_directory_of_timelines_and_rows_that_cannot_be_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        write(tmp_path / f"t.rank{rank}.json", timeline(rank))
    note = "more than 256 ranks are what the model gives: no job has so many"
    options = ["--bandwidth", "1G", "--latency", "100us"]
    for hosts, beyond in (("2,128", False), ("2,129", True)):
        assert main([str(tmp_path), "--hosts", hosts, *options]) == 0
        shown = capsys.readouterr().out
        assert (note in shown) is beyond and "each rank keeps its batch" in shown
        assert main([str(tmp_path), "--hosts", hosts, *options, "--json"]) == 0
        assert any(note in each for each in json.loads(capsys.readouterr().out)["recorded"]["notes"]) is beyond


def test_other_knobs_than_those_of_the_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "t.json", timeline(0))
    options = ["--fusion-threshold", "1M", "--cycle-time-ms", "2", "--chunk-bytes", "4K", "--json"]
    options += ["--between-hosts", "chain"]
    assert main([str(path), *LIST, *options]) == 0
    rules = json.loads(capsys.readouterr().out)["rules"]
    assert rules == {
        "fusion_threshold": 1 << 20,
        "cycle_time": 2e-3,
        "chunk_bytes": 4096,
        "between_hosts": "chain",
    }


def table(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """Return the command's JSON."""
    assert main([str(path), *LIST, *options, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_another_compression_than_the_recorded_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """400 bytes in memory have travelled as 200 of bf16."""
    path = write(tmp_path / "t.json", timeline(0, entry={"dtype": "float32", "compression": "bf16"}))
    sent = {wire: table(path, capsys, "--compression", wire)["hosts"][1]["nbytes"] for wire in ("bf16", "none")}
    # One exchange: of all values of the host's two ranks.
    assert sent == {"bf16": 400, "none": 800}
    assert table(path, capsys)["hosts"][1]["nbytes"] == 400 and table(path, capsys)["compression"] is None
    assert main([str(path), *LIST, "--compression", "fp8"]) == 0
    shown = capsys.readouterr().out
    assert "variant: compression fp8\n" in shown and "65/64 bytes an element" in shown


def test_local_steps_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "t.json", timeline(0))
    options = ["--local-steps", "10", "--delay", "3", "--compression", "bf16"]
    found = table(path, capsys, *options)
    assert found["local_steps"] == {"every": 10, "fragments": 1, "delay": 3}
    # 200 bytes of float32 without compression, so 100 as bf16, of two ranks in each tenth step.
    assert [row["nbytes"] for row in found["hosts"][:2]] == [0, pytest.approx(2 * 100 / 10)]
    assert [row["efficiency"] for row in found["hosts"]] == pytest.approx([1, 1, 1])
    drawn = tmp_path / "t.svg"
    assert main([str(path), *LIST, *options, "--picture", str(drawn)]) == 0
    shown = capsys.readouterr().out
    line = "10 local steps between averagings, 1 fragment, applied 3 steps later, compression bf16"
    assert f"variant: {line}\n" in shown and "the outer optimizer takes no time" in shown
    assert "10 local steps" in "".join(ElementTree.parse(drawn).getroot().itertext())


def test_a_recording_with_local_steps_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = timeline(0)
    events[1]["args"]["name"] = "outer2.fc.weight"
    path = write(tmp_path / "t.json", events)
    assert "an OuterOptimizer has synchronised" in table(path, capsys)["recorded"]["notes"][-1]


@pytest.mark.parametrize(
    ("options", "entry", "why"),
    [
        (["--compression", "fp8"], {"algorithm": "device"}, "are on a GPU, where the engine has no fp8: give bf16"),
        (["--compression", "fp8"], {"kind": "reducescatter"}, "reduce-scatters cannot travel as fp8: give bf16"),
        (["--local-steps", "5"], {"kind": "allgather"}, "no allreduce of floating numbers: they have allgather"),
        (["--local-steps", "5"], {"dtype": "int32"}, "no allreduce of floating numbers: they have allreduce"),
        (["--local-steps", "5", "--fragments", "2"], {}, "--fragments 2: the recorded steps have 1 gradient"),
    ],
)
def test_a_variant_that_the_recorded_job_cannot_be(
    options: list[str], entry: dict[str, Any], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = entry.pop("kind", "allreduce")
    events = [
        event | {"name": kind} if event["name"] == "allreduce" else event for event in timeline(0, entry=dict(entry))
    ]
    assert main([str(write(tmp_path / "t.json", events)), *LIST, *options]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--delay", "3"], "--delay is one of local steps: give --local-steps N, too"),
        (["--fragments", "3"], "--fragments is one of local steps"),
        (["--local-steps", "3", "--delay", "3"], "--delay 3: a synchronisation is applied before the next one"),
        (["--local-steps", "3", "--fragments", "4"], "--fragments 4: each has a step of its own, so at most 3"),
        (["--local-steps", "0"], "argument --local-steps"),
        (["--compression", "int4"], "argument --compression"),
    ],
)
def test_options_of_variants_that_contradict_each_other(
    options: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["t.json", *LIST, *options])
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([head(0)], "no steps after the first: record more of them, with a DistributedOptimizer"),
        (timeline(0, count=1), "no steps after the first"),
        ([head(0), *(slice_(0, 1, "step", at, at + 1) for at in range(5))], "give the files of all ranks"),
    ],
)
def test_a_recording_without_steps_or_tensors_is_refused(tmp_path: Path, events: Any, why: str) -> None:
    with pytest.raises(TraceError, match=why):
        choose_steps(read([write(tmp_path / "t.json", events)], []))


def test_a_recording_of_several_hosts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for rank in (0, 1):
        events = timeline(rank)
        events[0]["args"]["engine_timeline"]["hosts"] = 2
        files.append(str(write(tmp_path / f"t.rank{rank}.json", events)))
    assert main([*files, *LIST]) == 2
    told = capsys.readouterr()
    assert told.err == "enginerun foresee: error: recorded on 2 hosts; foresee needs a recording of one host\n"
    assert not told.out


def test_a_file_that_is_no_timeline_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.json"
    path.write_text("{}")
    assert main([str(path), *LIST]) == 2
    assert "no timeline of this engine; a timeline is what 'enginerun --timeline" in capsys.readouterr().err
    assert main([str(tmp_path / "none.json"), *LIST]) == 2
    assert "none.json: No such file" in capsys.readouterr().err
    write(path, timeline(0))
    assert main([str(path), *LIST, "--picture", str(tmp_path / "no" / "p.svg")]) == 2
    assert "p.svg" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("--hosts", "2,x", "numbers of hosts from 1 to 65536 with commas"),
        ("--hosts", "0", "numbers of hosts from 1"),
        ("--bandwidth", "25", "of bits a second from 1 to 1e+15 with its unit, such as 25G"),
        ("--bandwidth", "3GB/s", "of bytes a second, eight times"),
        ("--bandwidth", "0G", "of bits a second"),
        ("--bandwidth", "1.2.3G", "of bits a second"),
        ("--latency", "30", "a time of at most 3600 s with its unit"),
        ("--latency", "-1us", "a time of at most 3600 s with its unit"),
        ("--cycle-time-ms", "-1", "a number from 0"),
    ],
)
def test_what_an_option_does_not_take_is_said(
    option: str, value: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["t.json", *LIST, f"{option}={value}"])
    error = capsys.readouterr().err
    assert f"argument {option}" in error and repr(value) in error and why in error


def test_units() -> None:
    rates = ("25G", "25Gb", "25 Gbit/s", "25Gbps", "25000M", "2.5e10 bit/s")
    assert [bit_rate(text) for text in rates] == [25e9] * len(rates)
    assert bit_rate("800k") == 800e3
    times = ("30us", "30\u00b5s", "0.03ms", "30000 ns", "0.00003s")
    assert [short_time(text) for text in times] == pytest.approx([30e-6] * len(times))
    assert short_time("0") == 0
