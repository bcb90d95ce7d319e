"""`log`: sends a value to the callbacks of `ElasticRayExecutor.run`, under Horovod's name."""

from __future__ import annotations

import base64
from typing import Any

from ray import cloudpickle

from ..elastic.worker import run
from ..session import topology

__all__ = ["log"]

LIMIT = 500 << 10  # largest pickle in bytes; its base64 text fits into one message of the gate


def log(info: Any) -> None:
    """Send a value to the caller's callbacks. Does nothing on ranks other than 0, and outside an elastic job.

    Raises ValueError if its pickle has more than 500 KiB.
    """
    if topology.rank() == 0:
        data = cloudpickle.dumps(info)
        if len(data) > LIMIT:
            raise ValueError(f"ray_logger.log: a {type(info).__name__} of {len(data) >> 10} KiB; {LIMIT >> 10} KiB go")
        run.log(base64.b64encode(data).decode())


def decode_logged(value: str) -> Any:
    """Decode a value that a worker has logged, on the caller's side."""
    return cloudpickle.loads(base64.b64decode(value))
