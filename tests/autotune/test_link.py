"""The model of the transport: found again from noisy batches, and its suggestion against an exhaustive search."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.link import Link, fit, suggestion


def waited(link: Link, total: float, arriving: float, batch: float) -> float:
    """What the optimizer waits for, by the model."""
    sent = total / batch * link.latency + total / link.bandwidth
    return link.latency + batch / link.bandwidth + max(0.0, sent - arriving)


@pytest.mark.parametrize("seed", range(5))
def test_latency_and_bandwidth_are_found_among_batches_that_waited_for_late_ranks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = 2.0 ** rng.uniform(12, 24, 200)
    late = np.where(rng.random(200) < 0.3, rng.exponential(5e-3, 200), 0.0)
    seconds = (40e-6 + sizes / 5e9) * np.exp(rng.normal(0.0, 0.05, 200)) + late
    link = fit(list(zip(sizes, seconds, strict=True)))
    assert link is not None
    assert link.latency == pytest.approx(40e-6, rel=0.25) and link.bandwidth == pytest.approx(5e9, rel=0.15)


@pytest.mark.parametrize(
    "batches",
    [
        [],
        [(1e6, 1e-3)] * 7,
        [(1e6, 1e-3), (2e6, 2e-3)] * 20,  # too alike
        [(1e4, 2e-3), (1e6, 1e-3)] * 20,  # the larger ones are faster
        [(0.0, 1e-3), (1e6, 0.0)] * 20,
    ],
)
def test_what_says_nothing_gives_no_model(batches: list[tuple[float, float]]) -> None:
    assert fit(batches) is None


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
    knobs = suggestion(link, total, arriving)
    found = waited(link, total, arriving, knobs["fusion_threshold"])
    tried = np.exp(np.linspace(0.0, np.log(total), 400))
    least = min(waited(link, total, arriving, batch) for batch in tried)
    assert found <= 1.03 * least + 2.0 / bandwidth  # a byte more, since they are whole
    assert knobs["cycle_time_ms"] == 0.0 or 0.1 < knobs["cycle_time_ms"] <= 1e3 * arriving
