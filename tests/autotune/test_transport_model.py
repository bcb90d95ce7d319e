"""Model of the transport: recovered from noisy batches, and its suggestion compared with an exhaustive search."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.space import Choice, Integer, Real, Space
from autotune.transport_model import Link, find_first_setting, fit_link, suggest_knobs
from engine.tuning.job import summarize_traffic


def waited(link: Link, total: float, arriving: float, batch: float) -> float:
    """Return the time for which the optimizer waits, by the model."""
    sent = total / batch * link.latency + total / link.bandwidth
    return link.latency + batch / link.bandwidth + max(0.0, sent - arriving)


@pytest.mark.parametrize("seed", range(5))
def test_latency_and_bandwidth_are_found_among_batches_that_waited_for_late_ranks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = 2.0 ** rng.uniform(12, 24, 200)
    late = np.where(rng.random(200) < 0.3, rng.exponential(5e-3, 200), 0.0)
    seconds = (40e-6 + sizes / 5e9) * np.exp(rng.normal(0.0, 0.05, 200)) + late
    link = fit_link(list(zip(sizes, seconds, strict=True)))
    assert link is not None
    assert link.latency == pytest.approx(40e-6, rel=0.25) and link.bandwidth == pytest.approx(5e9, rel=0.15)


@pytest.mark.parametrize(
    "batches",
    [
        [],
        [(1e6, 1e-3)] * 7,
        [(1e6, 1e-3), (2e6, 2e-3)] * 20,  # sizes too similar
        [(1e4, 2e-3), (1e6, 1e-3)] * 20,  # the larger ones are faster
        [(0.0, 1e-3), (1e6, 0.0)] * 20,
    ],
)
def test_what_says_nothing_gives_no_model(batches: list[tuple[float, float]]) -> None:
    assert fit_link(batches) is None


@given(
    latency=st.floats(1e-6, 1e-2),
    bandwidth=st.floats(1e7, 1e11),
    total=st.floats(1e3, 1e10),
    arriving=st.floats(0.0, 10.0),
)
def test_no_other_batch_size_would_be_better_by_the_model(
    latency: float, bandwidth: float, total: float, arriving: float
) -> None:
    link = Link(latency, bandwidth)
    knobs = suggest_knobs(link, total, arriving)
    found = waited(link, total, arriving, knobs["fusion_threshold"])
    tried = np.exp(np.linspace(0.0, np.log(total), 400))
    least = min(waited(link, total, arriving, batch) for batch in tried)
    assert found <= 1.03 * least + 2.0 / bandwidth  # one byte more, because bytes are whole numbers
    assert knobs["cycle_time_ms"] == 0.0 or 0.1 < knobs["cycle_time_ms"] <= 1e3 * arriving * (1 + 1e-12)  # rounding


SPACE = Space(
    fusion_threshold=Integer(1 << 16, 1 << 30, log=True),
    cycle_time_ms=Real(0.05, 50.0, log=True, off=0.0),
    stores=Choice(["auto", "cached"]),
)
DEFAULT = {"fusion_threshold": 1 << 26, "cycle_time_ms": 5.0, "stores": "auto"}
BATCHES = [(size, 1e-4 + size / 1e9) for size in (1e5, 1e6, 1e7)] * 4


def test_where_to_look_first_is_in_the_space_and_leaves_other_knobs() -> None:
    found = find_first_setting({"batches": BATCHES, "bytes": 1e8, "arriving": 0.05}, SPACE, DEFAULT)
    assert found is not None
    link, knobs = found
    assert knobs == SPACE.check(knobs) and knobs["stores"] == "auto"
    expected = suggest_knobs(link, 1e8, 0.05)
    assert knobs["fusion_threshold"] == pytest.approx(expected["fusion_threshold"], rel=1e-3)
    assert knobs["cycle_time_ms"] == pytest.approx(expected["cycle_time_ms"], rel=1e-3)
    small = find_first_setting({"batches": BATCHES, "bytes": 1e4, "arriving": 0.05}, SPACE, DEFAULT)
    assert small is not None and small[1]["fusion_threshold"] == 1 << 16


@pytest.mark.parametrize("lacks", [{"batches": []}, {"bytes": 0}, {"arriving": None}])
def test_without_a_model_there_is_nothing_to_try_first(lacks: dict[str, Any]) -> None:
    assert find_first_setting({"batches": BATCHES, "bytes": 1e8, "arriving": 0.05} | lacks, SPACE, DEFAULT) is None


def test_a_space_without_its_knobs_has_nothing_to_try_first() -> None:
    space = Space(stores=Choice(["auto", "cached"]))
    traffic = {"batches": BATCHES, "bytes": 1e8, "arriving": 0.05}
    assert find_first_setting(traffic, space, {"stores": "auto"}) is None


def row(started: float, nbytes: int = 100, **changes: Any) -> dict[str, Any]:
    return {
        "type": "batch",
        "kind": "allreduce",
        "bytes": nbytes,
        "started": started,
        "ended": started + 0.5,
        **changes,
    }


def test_batches_are_those_of_allreduces_that_have_ended_and_steps_lie_between_marks() -> None:
    history = [
        row(1.0),
        row(3.0, 300),
        row(3.5, kind="broadcast"),
        row(4.5, type="skip"),
        row(12.0),
        row(15.0),
        row(17.0, ended=None),
        row(21.0),
    ]
    seen = summarize_traffic(history, [0.0, 10.0, 20.0, 30.0])
    assert seen == {"batches": [[100, 0.5], [300, 0.5], [100, 0.5], [100, 0.5], [100, 0.5]], "arriving": 2.5}
    assert summarize_traffic(history, [0.0])["arriving"] is None
