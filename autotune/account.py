"""The cost of trials: steps lost against the *standing* setting, the one that a trial has to beat.

The machine itself becomes slower and faster. So a trial is compared with the time of the standing setting interpolated
between its measurements before and after: a slower machine costs nothing here, and the standing setting loses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

MOST = 50.0
"""Largest logarithm of a ratio of times that is counted: exp of a larger one might overflow."""


def excesses(settings: Sequence[str], standing: Sequence[str], logs: Sequence[float]) -> list[float]:
    """By how much each trial was slower than the standing setting, whose own is 0: logarithms of ratios of times.

    Parameters
    ----------
    settings, standing : sequence of str
        The setting of each trial, in the order measured, and the one standing then: equal texts are equal settings.
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
    """Steps that each trial has lost, gains not counted: its excess times its number of steps."""
    excess = excesses(settings, standing, logs)
    return [max(0.0, math.expm1(min(each, MOST))) * count for each, count in zip(excess, counts, strict=True)]
