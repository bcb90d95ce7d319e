"""First settings of a search, from which the surrogate learns: corners of the space that combine every two knobs.

Knobs interact: a large threshold may help only together with a long cycle time. Evenly spread settings easily miss such
a corner, and no setting near the default reveals it. In an orthogonal array of strength two, every pair of knobs takes
all four combinations of a small and a large value. This needs the fewest settings: four for three knobs, eight for
seven.

References
----------
R. L. Plackett and J. P. Burman, The design of optimum multifactorial experiments, Biometrika 33 (1946).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autotune.space import Choice, Knobs, Space
from autotune.trials import Epoch, make_setting_key

Array = NDArray[np.float64]

INSIDE = (0.03, 0.15)
"""Least and greatest distance of a corner's number from the end of its range, as shares of the range."""


def build_corners(space: Space, most: int, rng: np.random.Generator) -> list[Knobs]:
    """Return settings near corners of the space, beginning with those in which the first two knobs are equal in size.

    There are at most `most`. `rng` draws each setting's distance from its corner, and the first combinations of the
    further knobs.
    """
    count = len(space.knobs)
    high = build_orthogonal_array(count)
    high[:, 2:] ^= rng.integers(2, size=max(count - 2, 0)).astype(bool)
    nearest, farthest = INSIDE
    inside = rng.uniform(nearest, farthest, high.shape)
    whole = np.array([isinstance(knob, Choice) for knob in space.knobs.values()])
    inside = np.where(whole, 0.5 * rng.random(high.shape), inside)  # for a choice, any value of that half
    return [space.decode(row) for row in space.encode_shares(np.where(high, 1.0 - inside, inside))[:most]]


def build_orthogonal_array(knobs: int) -> NDArray[np.bool_]:
    """Return an orthogonal array of strength two, of shape (n, knobs): whether a knob is large.

    Its first four rows have all combinations of the first two knobs.
    """
    bits = 1
    while (1 << bits) - 1 < knobs:
        bits += 1
    bits = max(bits, 2)
    rows = np.array([3, 0, 2, 1, *range(4, 1 << bits)])  # both large, both small, then one of each
    columns = sorted(range(1, 1 << bits), key=lambda column: (column.bit_count(), column))[:knobs]
    together = rows[:, None] & np.array(columns)[None, :]
    return np.array([[int(each).bit_count() % 2 == 1 for each in row] for row in together])


def move_half_way(space: Space, knobs: Knobs, default: Knobs) -> Knobs:
    """Return the setting half way to the default where a knob is a number; a corner itself may be many times slower."""
    at, home = space.encode(knobs), space.encode(default)
    middle = at.copy()
    for g, knob in enumerate(space.knobs.values()):
        if not isinstance(knob, Choice):
            columns = space.groups == g
            apart = knob.off is not None and at[columns][1] != home[columns][1]
            middle[columns] = home[columns] if apart else (at[columns] + home[columns]) / 2
    return space.decode(middle)


def build_first_epoch(space: Space, default: Knobs, first: Sequence[Knobs], max_trials: int, seed: int) -> Epoch:
    """Return the first epoch: the default, the settings given to be tried first, and settings half way to corners."""
    most = max(1, max_trials // 4)
    far = build_corners(space, most, np.random.default_rng([seed, 0]))
    halfway = [move_half_way(space, corner, default) for corner in far]
    epoch = Epoch(0, default, max_trials, [default], [*first, *halfway])
    epoch.outward = {make_setting_key(half): corner for half, corner in zip(halfway, far, strict=True)}
    epoch.corners = most - len(halfway)
    return epoch
