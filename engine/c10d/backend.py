"""Backend of torch.distributed over the engine: one device's part of an ordinary group, from torch 2.14 on.

It serves `"cpu:engine,cuda:nccl"`, and lies beneath an `EngineProcessGroup`. C++ wraps its works, so that Python
callers of such a composed group see less of them: `is_completed` is false until they wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from . import NAME
from .formation import shrink_membership
from .membership import MemberOperations, Membership
from .operations import Submission

CPU = torch.device("cpu")
SHRINK_ABORT = 1  # torch's flag
RECONFIGURED = (
    "the backend 'engine' does not reconfigure a group, which could also get new ranks: shrink_group continues without "
    "some ranks, and destroy_process_group with another init_process_group continues with any"
)
_TorchBackend: Any = c10d.Backend
_held: set[DeviceBackend] = set()  # C++ holds a backend, and not its Python half


class DeviceBackend(MemberOperations, _TorchBackend):
    """Backend whose collectives run on the engine."""

    def __init__(self, membership: Membership) -> None:
        _TorchBackend.__init__(self, membership.engine.rank, membership.engine.size)
        MemberOperations.__init__(self, membership)
        self._mislabelled = False
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

    supports_shrinking = True

    def shrink(self, ranks_to_exclude: Sequence[int], shrink_flags: int = 0, opts_override: Any = None) -> Any:
        """Return a backend of the ranks that are left; called by `shrink_group` on these."""
        timeout = self.membership.timeout if opts_override is None else opts_override._timeout
        abort = bool(shrink_flags & SHRINK_ABORT)
        shrunk = DeviceBackend(shrink_membership(self.membership, ranks_to_exclude, abort, timeout))
        shrunk._mislabelled = True
        return shrunk.hold_alive()

    def open_submission(self, kind: str, event: str = "") -> Submission:
        if self._mislabelled:
            self._correct_label()
        return super().open_submission(kind, event)

    def _correct_label(self) -> None:
        """Register this backend under its own kind in the group that torch has made for it.

        `shrink_group` says of every group on CPUs that it is gloo's, and then DDP reads options of gloo from it.
        """
        self._mislabelled = False
        for group in list(dist.distributed_c10d._world.pg_map):
            if type(group) is dist.ProcessGroup and self in map(group._get_backend, group._device_types):
                group._register_backend(CPU, dist.ProcessGroup.BackendType.CUSTOM, self)
                group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)

    def get_reconfigure_handle(self) -> str:
        raise NotImplementedError(RECONFIGURED)

    def reconfigure(self, _opts: Any) -> Any:
        raise NotImplementedError(RECONFIGURED)

    def shutdown(self) -> None:
        _held.discard(self)
        super().shutdown()


# Torch asks the Python half for each, which without one of its own would ask torch again, for ever.
for _name in dir(_TorchBackend):
    if _name.startswith(("supports_", "_supports_")) and _name not in vars(DeviceBackend):
        setattr(DeviceBackend, _name, False)
