"""Cost of trials: steps lost against the *standing* setting, the one that a trial has to beat.

The machine itself becomes slower and faster. So a trial is compared with the time of the standing setting interpolated
between its measurements before and after: a slower machine costs nothing here, and the standing setting loses nothing.
If these measurements differ by no more than their errors explain, their mean is used: noise is not a slower machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MOST = 50.0
"""Largest logarithm of a ratio of times that is counted, so that exp does not overflow."""


def compute_excesses(
    settings: Sequence[str], standing: Sequence[str], logs: Sequence[float], errors: Sequence[float]
) -> list[float]:
    """Return by how much each trial was slower than the standing setting: logarithms of ratios, 0 for the latter's own.

    `settings` has the setting of each trial, in the order measured, and `standing` the standing one at that time; equal
    texts are equal settings. `logs` are logarithms of the seconds per step, and `errors` their standard errors.
    """
    found = [0.0] * len(settings)
    for stood in set(standing):
        beside = [k for k, setting in enumerate(settings) if setting == stood]
        if not beside:
            continue
        stood_logs = shrink_to_mean(np.array([logs[k] for k in beside]), np.array([errors[k] for k in beside]))
        expected = np.interp(np.arange(len(settings)), beside, stood_logs)
        for k, setting in enumerate(settings):
            if standing[k] == stood != setting:
                found[k] = logs[k] - float(expected[k])
    return found


def shrink_to_mean(logs: NDArray[np.float64], errors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Shrink measurements of one setting towards their mean, by the share of variance that their errors explain."""
    if len(logs) < 2:
        return logs
    mean, variance = float(np.mean(logs)), float(np.var(logs, ddof=1))
    real = max(0.0, 1.0 - float(np.mean(errors**2)) / variance) if variance > 0.0 else 0.0
    return np.asarray(mean + real * (logs - mean))


def compute_steps_lost(excess: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Return the steps that each trial has lost, without gains: its excess times its number of steps."""
    return [max(0.0, math.expm1(min(each, MOST))) * count for each, count in zip(excess, counts, strict=True)]
