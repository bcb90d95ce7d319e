"""Hugging Face Trainer, Accelerate and Lightning with the engine. Each library is imported at its first use."""

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
    """Import the module of a name at its first use."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
