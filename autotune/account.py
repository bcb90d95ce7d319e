"""What trials have cost: steps that they have lost against the setting that stood, on a machine that itself changes.

A trial is compared with what stood as that was measured beside it: between two measurements of what stood, its time is
interpolated. So a machine that becomes slower costs nothing here, and what stood never loses against itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

MOST = 50.0
"""Logarithm of a ratio: larger ones are too large for a float."""


def excesses(settings: Sequence[str], standing: Sequence[str], logs: Sequence[float]) -> list[float]:
    """By how much each trial was slower than what stood: logarithm of a ratio of times; 0 of what stood itself.

    Parameters
    ----------
    settings, standing : sequence of str
        Of each trial in the order measured, what was tried and what stood then: equal texts are equal settings.
    logs : sequence of float
        Logarithms of the seconds per step.
    """
    found = [0.0] * len(settings)
    for stood in set(standing):
        beside = [k for k, setting in enumerate(settings) if setting == stood]
        if not beside:
            continue
        expected = np.interp(np.arange(len(settings)), beside, [logs[k] for k in beside])
        for k, setting in enumerate(settings):
            if standing[k] == stood != setting:
                found[k] = logs[k] - float(expected[k])
    return found


def losses(
    settings: Sequence[str], standing: Sequence[str], logs: Sequence[float], counts: Sequence[int]
) -> list[float]:
    """Steps that each trial has lost, gains not counted: `excesses` of trials of so many steps."""
    excess = excesses(settings, standing, logs)
    return [max(0.0, math.expm1(min(each, MOST))) * count for each, count in zip(excess, counts, strict=True)]
