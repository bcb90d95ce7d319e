"""Process group of torch.distributed over the engine, in place of torch's own `ProcessGroup`.

Python callers get the engine's works. From torch 2.14 on, an `DeviceBackend` lies beneath for what asks C++.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from .formation import form_membership, split_membership
from .membership import MemberOperations, Membership

if TYPE_CHECKING:
    from .backend import DeviceBackend

CPU = torch.device("cpu")
_TorchGroup: Any = dist.ProcessGroup  # torch's declarations of its methods are not those that it calls


class EngineProcessGroup(MemberOperations, _TorchGroup):
    """Process group whose collectives run on the engine."""

    def __init__(self, membership: Membership) -> None:
        _TorchGroup.__init__(self, membership.engine.rank, membership.engine.size)
        MemberOperations.__init__(self, membership)
        self._beneath: Any = None

    def put_beneath(self, backend: Any) -> None:
        """Register a `Backend` for those who ask this group for one."""
        self._beneath = backend
        self._register_backend(CPU, dist.ProcessGroup.BackendType.CUSTOM, backend)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> EngineProcessGroup | None:
        """Return a group of some ranks of this one, by their numbers in it; None on others. Collective over these."""
        if self.engine.rank not in new_ranks:
            return None
        parent = self.membership
        name = group_name or f"{parent.name} split {new_ranks}"
        store = PrefixStore(f"{name}/", parent.store)
        membership = split_membership(parent, list(new_ranks), store, name, timeout or parent.timeout)
        membership.rename_group(description=group_desc)
        return _make_group(membership, self._beneath is not None)

    supports_shrinking = True  # the refusal tells more than torch's

    def shrink(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"shrink_group of torch {torch.__version__} accepts no backend that is written in Python, which it does "
            "from 2.14 on. Have the ranks that are left call destroy_process_group, and init_process_group with a "
            "store, their new ranks and their number"
        )

    def merge_remote_group(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("the backend 'engine' does not merge groups")

    @property
    def group_name(self) -> str:
        return self.membership.name

    pg_name = group_name

    @property
    def group_desc(self) -> str:
        return self.membership.description

    def getGroupName(self) -> str:
        return self.membership.name

    def setGroupName(self, name: str) -> None:
        self.membership.rename_group(name=name)

    _set_group_name = setGroupName

    def getGroupDesc(self) -> str:
        return self.membership.description

    def setGroupDesc(self, description: str) -> None:
        self.membership.rename_group(description=description)

    _set_group_desc = setGroupDesc

    @property
    def _device_types(self) -> list[torch.device]:
        return [CPU]

    @property
    def supports_coalescing(self) -> bool:
        return False

    def _get_backend(self, device: torch.device) -> Any:
        return self._beneath or self

    def get_group_store(self) -> Any:
        return self.membership.store

    def __repr__(self) -> str:
        return f"<EngineProcessGroup {self.membership.title!r} of ranks {list(self.engine.numbers)}>"


def form_group(options: Any) -> EngineProcessGroup | DeviceBackend:
    """Create a process group, or a backend for one device of it; the entry point of `enginerun_torch`.

    From torch 2.14 on, options name the group `around`; one with other backends too gets a backend alone.
    """
    membership = form_membership(options)
    around = getattr(options, "process_group", None)
    if around is None or around.name() == "custom":  # the type of its default backend
        return _make_group(membership, around is not None)
    return _make_backend(membership).hold_alive()


def _make_group(membership: Membership, takes_backends: bool) -> EngineProcessGroup:
    group = EngineProcessGroup(membership)
    if takes_backends:
        group.put_beneath(_make_backend(membership))
    return group


def _make_backend(membership: Membership) -> DeviceBackend:
    from .backend import DeviceBackend  # of older versions' backends, no subclass can be made

    return DeviceBackend(membership)
