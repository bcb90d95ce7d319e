"""The engine on Ray: `RayExecutor` as Horovod has it, and backends for the trainers of Ray Train.

`EngineConfig` and `EngineTorchConfig` are imported when they are asked for: they need what `pip install 'ray[train]'`
brings, and the second one torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .executor import RayExecutor
from .settings import Settings

if TYPE_CHECKING:
    from .train import EngineConfig
    from .train_torch import EngineTorchConfig

__all__ = ["EngineConfig", "EngineTorchConfig", "RayExecutor", "Settings"]

_LATER = {"EngineConfig": ".train", "EngineTorchConfig": ".train_torch"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name], __name__), name)
