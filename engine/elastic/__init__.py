"""Elastic training: states that survive a world, samplers that continue in the next one, and a loop over both.

Names are loaded on first use, since launchers use modules of this package without the extension.
docs/architecture/elastic.md describes each module.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .samplers import ElasticBatchSampler, ElasticSampler
    from .state import HostsUpdatedInterrupt, ObjectState, State
    from .worker.batches import loop
    from .worker.gate import JobOver
    from .worker.run import leave, run

_HOME = {
    "ElasticBatchSampler": "samplers",
    "ElasticSampler": "samplers",
    "HostsUpdatedInterrupt": "state",
    "JobOver": "worker.gate",
    "ObjectState": "state",
    "State": "state",
    "leave": "worker.run",
    "loop": "worker.batches",
    "run": "worker.run",
}

__all__ = [
    "ElasticBatchSampler",
    "ElasticSampler",
    "HostsUpdatedInterrupt",
    "JobOver",
    "ObjectState",
    "State",
    "leave",
    "loop",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
