"""Entry points of torch: they register the backend "engine" in torch.distributed, and import nothing of the package.

Installed beside the package, not in it: torch loads this file at `import torch`, where a package `engine` may be the
program's own.
"""

from __future__ import annotations

import traceback
import warnings
from typing import Any

NAME = "engine"
OLDEST = "2.7"  # the first whose C++ keeps the Python half of a work


def register() -> None:
    """Register the backend in torch.distributed, unless that is done or torch was built without it.

    Torch 2.14 and newer call this when the name is first used. Up to 2.13, programs call it before
    `init_process_group` where the variable TORCH_DEVICE_BACKEND_AUTOLOAD is 0.
    """
    import torch.distributed as dist

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create_group, extended_api=True, devices=["cpu"])


def register_at_import() -> None:
    """Register the backend at the end of `import torch`, which must not fail for it; called by torch up to 2.13."""
    try:
        register()
    except Exception as error:
        reason = traceback.format_exception_only(error)[-1].strip()
        warnings.warn(f"enginerun: torch.distributed has no backend {NAME!r}: {reason}", RuntimeWarning, stacklevel=2)


def create_group(options: Any, _own: Any) -> Any:
    """Create a process group from torch's options; called by `init_process_group` and `new_group` on its members."""
    import torch

    if torch.__version__ < OLDEST:
        raise RuntimeError(
            f"the backend {NAME!r} of torch.distributed needs torch 2.7 or newer, and this is {torch.__version__}: "
            "older versions lose the works of a backend that is written in Python"
        )
    from enginerun.c10d.process_group import form_group

    return form_group(options)
