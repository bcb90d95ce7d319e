"""Registration of the backend's name in torch.distributed: imports nothing heavy before the first group is made."""

from __future__ import annotations

from typing import Any

from . import NAME


def register() -> None:
    """Register the backend in torch.distributed, unless that is done or torch was built without it."""
    import torch.distributed as dist

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create_group, extended_api=True, devices=["cpu"])


def create_group(options: Any, _own: Any) -> Any:
    """Create a process group from torch's options; called by `init_process_group` and `new_group` on its members."""
    from .process_group import form_group

    return form_group(options)
