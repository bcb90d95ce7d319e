"""Engine on Ray: the executors of Horovod, for jobs of fixed size and elastic ones, and Ray Train.

`EngineConfig` and `EngineTorchConfig` are imported on first use: both need `pip install 'ray[train]'`, and the second
one torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .elastic import ElasticRayExecutor
from .executor import RayExecutor
from .settings import ElasticSettings, Settings

if TYPE_CHECKING:
    from .train import EngineConfig
    from .train_torch import EngineTorchConfig

__all__ = [
    "ElasticRayExecutor",
    "ElasticSettings",
    "EngineConfig",
    "EngineTorchConfig",
    "RayExecutor",
    "Settings",
]

_LATER = {"EngineConfig": ".train", "EngineTorchConfig": ".train_torch"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name], __name__), name)
