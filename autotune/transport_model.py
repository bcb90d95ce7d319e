"""Model of the transport, fitted to the job's own traffic, and the knobs that it suggests.

Gradients arrive evenly over the backward pass and travel in batches, one at a time. A batch of n bytes takes `latency +
n / bandwidth`. The optimizer waits for the last batch, and for all that had not been sent when that was complete. The
model ignores that computation and communication share processors, so it only suggests where to look first.

References
----------
S. Shi, X. Chu and B. Li, MG-WFBP: Efficient data communication for distributed synchronous SGD algorithms, 2018,
arXiv:1811.11141: merging gradients by such a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.space import Choice, Knobs, Space

LEAST_BATCHES = 8  # minimum number of batches for a fit
APART = 4.0  # minimum ratio of the largest to the smallest batch, to tell latency and bandwidth apart
WAITING = 1e-4  # seconds; a shorter cycle time is as good as none


@dataclass(frozen=True)
class Link:
    """Model of a batch's time: `latency` plus its bytes over `bandwidth`."""

    latency: float  # seconds
    bandwidth: float  # bytes per second


def fit_link(batches: Sequence[tuple[float, float]]) -> Link | None:
    """Fit the model to the batches, pairs of bytes and seconds.

    Returns None if there are too few batches, their sizes are too similar, or larger ones do not take longer. Ranks
    wait for each other in a batch, so times have a long tail. Therefore sizes are grouped by powers of two, and each
    class counts with the lower quartile of its times. The line has the median slope (P. K. Sen, 1968).
    """
    known = np.array([(size, seconds) for size, seconds in batches if size > 0 and seconds > 0], dtype=np.float64)
    if len(known) < LEAST_BATCHES or known[:, 0].max() < APART * known[:, 0].min():
        return None
    classes = np.floor(np.log2(known[:, 0]))
    points = np.array(
        [
            (np.median(known[classes == each, 0]), np.quantile(known[classes == each, 1], 0.25))
            for each in np.unique(classes)
        ]
    )
    first, second = np.triu_indices(len(points), 1)
    slope = float(np.median((points[second, 1] - points[first, 1]) / (points[second, 0] - points[first, 0])))
    if slope <= 0.0:
        return None
    latency = float(np.median(points[:, 1] - slope * points[:, 0]))
    return Link(max(latency, 1e-6), 1.0 / slope)


def suggest_knobs(link: Link, total: float, arriving: float) -> Knobs:
    """Return the `fusion_threshold` and `cycle_time_ms` for which the optimizer waits least.

    A step has `total` bytes, and `arriving` seconds pass from the first gradient to the last. With batches of n bytes
    the optimizer waits `latency + n / bandwidth + max(0, total / n * latency + total / bandwidth - arriving)`. If the
    link is slower, the minimum is at n = sqrt(total * latency * bandwidth). Otherwise it is at the smallest n for which
    the link keeps up, if that is smaller.
    """
    batch = math.sqrt(total * link.latency * link.bandwidth)
    idle = arriving - total / link.bandwidth
    if idle > 0.0:
        batch = min(batch, total * link.latency / idle)
    batch = min(max(batch, 1.0), total)
    cycle = arriving * batch / total
    return {"fusion_threshold": math.ceil(batch), "cycle_time_ms": 1e3 * cycle if cycle > WAITING else 0.0}


def find_first_setting(
    traffic: Mapping[str, Any], space: Space, default: Mapping[str, Any]
) -> tuple[Link, Knobs] | None:
    """Return the model and the first setting to try, based on the job's traffic.

    `traffic` has `batches`, pairs of bytes and seconds; `bytes` of a step; and `arriving`, the seconds in which they
    arrive, or None. Knobs about which the model says nothing have their default. Returns None if there is no model, or
    no knob of the space to which it applies.
    """
    link = fit_link(traffic["batches"])
    if link is None or not traffic["bytes"] or not traffic["arriving"]:
        return None
    suggested: Knobs = {}
    for name, value in suggest_knobs(link, traffic["bytes"], traffic["arriving"]).items():
        knob = space.knobs.get(name)
        if knob is not None and not isinstance(knob, Choice):
            suggested[name] = knob.decode(knob.encode(value if value == knob.off else max(value, knob.low)))
    return (link, {**default, **suggested}) if suggested else None
