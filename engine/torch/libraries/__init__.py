"""Hugging Face Trainer, Accelerate and Lightning over the engine. Each library is imported when its name is used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .loss import global_mean
from .world import export_place

_MODULES = {
    "Accelerator": ".accelerate",
    "Trainer": ".trainer",
    "TrainerMixin": ".trainer",
    "lightning_strategy": ".lightning",
}

__all__ = ["Accelerator", "Trainer", "TrainerMixin", "export_place", "global_mean", "lightning_strategy"]


def __getattr__(name: str) -> Any:
    """Import the library that a name belongs to."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
