"""Backend of torch.distributed over the engine: one device's part of an ordinary group, from torch 2.14 on.

It serves `"cpu:engine,cuda:nccl"`, and lies beneath an `EngineProcessGroup`. C++ wraps its works, so that Python
callers of such a composed group see less of them: `is_completed` is false until they wait.
"""

from __future__ import annotations

from typing import Any

from torch._C import _distributed_c10d as c10d

from . import NAME
from .membership import MemberOperations, Membership

_TorchBackend: Any = c10d.Backend
_held: set[DeviceBackend] = set()  # C++ holds a backend, and not its Python half


class DeviceBackend(MemberOperations, _TorchBackend):
    """Backend whose collectives run on the engine."""

    def __init__(self, membership: Membership) -> None:
        _TorchBackend.__init__(self, membership.engine.rank, membership.engine.size)
        MemberOperations.__init__(self, membership)
        self._options = _TorchBackend.Options(NAME, timeout=membership.timeout)
        self._options.group_name = membership.name

    def hold_alive(self) -> DeviceBackend:
        """Return this backend, which lives until its `shutdown` though nothing in Python holds it."""
        _held.add(self)
        return self

    @property
    def options(self) -> Any:
        return self._options

    def supports_tensor_alloc(self, _device: Any) -> bool:
        return False

    def split(self, *_: Any) -> Any:
        """Refuse to split a composed group: torch crashes where a backend of Python says that a rank is outside."""
        raise NotImplementedError("the backend 'engine' does not split a group of several backends: use new_group")

    def shutdown(self) -> None:
        _held.discard(self)
        super().shutdown()


# Torch asks the Python half for each, which without one of its own would ask torch again, for ever.
for _name in dir(_TorchBackend):
    if _name.startswith(("supports_", "_supports_")) and _name not in vars(DeviceBackend):
        setattr(DeviceBackend, _name, False)
