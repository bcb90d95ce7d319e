"""What `RayExecutor.create_settings` makes: for how long a start may take, and over which network ranks speak."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Settings of a `RayExecutor`.

    Attributes
    ----------
    timeout_s : float
        Seconds in which the ranks have to meet in `engine.init()`: `ENGINE_START_TIMEOUT`.
    placement_group_timeout_s : float
        Seconds in which Ray has to find room for the ranks, and again those in which their processes have to come.
    nics : collection of str
        Network interfaces by which ranks of different hosts reach each other: each host uses the first one that it has.
        None: whichever leads there.
    """

    timeout_s: float = 30
    placement_group_timeout_s: float = 100
    nics: Collection[str] = ()
