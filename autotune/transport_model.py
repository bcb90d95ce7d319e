"""A model of the transport, measured on what the job itself has sent; and the knobs that it suggests.

Gradients arrive evenly over the backward pass and travel in batches. One of n bytes takes `latency + n / bandwidth`,
and one travels at a time. What the optimizer waits for is the last batch, and whatever had not been sent when it was
complete. This says nothing of processors that computation and communication share: it is where to look first.

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

LEAST_BATCHES = 8  # fewest batches to which a model is fitted
APART = 4.0  # least ratio of the largest to the smallest batch that tells latency and bandwidth apart
WAITING = 1e-4  # seconds: a shorter cycle time is as good as none


@dataclass(frozen=True)
class Link:
    """Time of a batch: `latency` and its bytes over `bandwidth`.

    Attributes
    ----------
    latency : float
        Seconds.
    bandwidth : float
        Bytes per second.
    """

    latency: float
    bandwidth: float


def fit(batches: Sequence[tuple[float, float]]) -> Link | None:
    """The model that explains most batches.

    Parameters
    ----------
    batches : sequence of (float, float)
        Bytes and seconds of each.

    Returns
    -------
    Link or None
        None if there are too few, of too similar sizes, or if the larger ones do not take longer.

    Notes
    -----
    Ranks wait for each other in a batch, so times have a long tail: sizes are put into classes, of powers of two, each
    of which counts by the quartile of its times. Through these goes the line of the median slope (P. K. Sen, 1968).
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


def suggestion(link: Link, total: float, arriving: float) -> Knobs:
    """The batches that leave the optimizer the least to wait for.

    Parameters
    ----------
    link : Link
    total : float
        Bytes of a step.
    arriving : float
        Seconds from the first gradient to the last.

    Returns
    -------
    dict
        `fusion_threshold` and `cycle_time_ms`.

    Notes
    -----
    With batches of n bytes the optimizer waits `latency + n / bandwidth + max(0, total / n * latency + total /
    bandwidth - arriving)`. Where the link is the slower, that is least at n = sqrt(total * latency * bandwidth); else
    at the smallest n for which the link keeps up, if that is smaller.
    """
    batch = math.sqrt(total * link.latency * link.bandwidth)
    idle = arriving - total / link.bandwidth
    if idle > 0.0:
        batch = min(batch, total * link.latency / idle)
    batch = min(max(batch, 1.0), total)
    cycle = arriving * batch / total
    return {"fusion_threshold": math.ceil(batch), "cycle_time_ms": 1e3 * cycle if cycle > WAITING else 0.0}


def first_setting(traffic: Mapping[str, Any], space: Space, default: Mapping[str, Any]) -> tuple[Link, Knobs] | None:
    """Where to look first, by what a job has sent.

    Parameters
    ----------
    traffic : mapping
        `batches`, pairs of bytes and seconds; `bytes` of a step; `arriving`, the seconds in which they come, or None.
    space : Space
    default : mapping
        Of what the model says nothing of.

    Returns
    -------
    (Link, dict) or None
        The model, and a setting in the space. None if there is no model, or it speaks of no knob of the space.
    """
    link = fit(traffic["batches"])
    if link is None or not traffic["bytes"] or not traffic["arriving"]:
        return None
    suggested: Knobs = {}
    for name, value in suggestion(link, traffic["bytes"], traffic["arriving"]).items():
        knob = space.knobs.get(name)
        if knob is not None and not isinstance(knob, Choice):
            suggested[name] = knob.decode(knob.encode(value if value == knob.off else max(value, knob.low)))
    return (link, {**default, **suggested}) if suggested else None
