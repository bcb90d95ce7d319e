"""A tuner for a handful of knobs, by trials of seconds: see `Tuner`. It needs numpy and scipy, and no engine."""

from autotune.policy import Settings, Trial, Tuner
from autotune.space import Choice, Integer, Real, Space

__all__ = ["Choice", "Integer", "Real", "Settings", "Space", "Trial", "Tuner"]
