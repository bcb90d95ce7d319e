"""Tuner for a handful of knobs, by trials that take seconds: see `Tuner`. It needs numpy and scipy, but no engine.

Names are loaded at first use, so that the tuner's process can report that scipy is missing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.policy import Tuner
    from autotune.space import Choice, Integer, Real, Space
    from autotune.trials import Settings, Trial

_HOME = {"Tuner": "policy", "Settings": "trials", "Trial": "trials"}
_HOME |= dict.fromkeys(("Choice", "Integer", "Real", "Space"), "space")

__all__ = ["Choice", "Integer", "Real", "Settings", "Space", "Trial", "Tuner"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'autotune' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"autotune.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
