"""A tuner for a handful of knobs, by trials of seconds: see `Tuner`. It needs numpy and scipy, and no engine.

Names are loaded when they are first used: the tuner's process has to be able to say that scipy is missing.
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
