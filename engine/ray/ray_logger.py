"""`log`: hands a value to the callbacks of `ElasticRayExecutor.run`, under Horovod's name."""

from __future__ import annotations

import base64
from typing import Any

from ray import cloudpickle

from .. import place
from ..elastic.worker import run

__all__ = ["log"]

LIMIT = 500 << 10  # bytes, of which base64 makes less than goes through the gate


def log(info: Any) -> None:
    """Have the caller's callbacks called with a value. Does nothing on ranks other than 0, and outside an elastic job.

    Parameters
    ----------
    info : object
        It is pickled, and has 500 KiB at most then.

    Raises
    ------
    ValueError
        It is larger.
    """
    if place.rank() == 0:
        data = cloudpickle.dumps(info)
        if len(data) > LIMIT:
            raise ValueError(f"ray_logger.log: a {type(info).__name__} of {len(data) >> 10} KiB; {LIMIT >> 10} KiB go")
        run.log(base64.b64encode(data).decode())


def logged(value: str) -> Any:
    """What a worker has logged, on the caller's side."""
    return cloudpickle.loads(base64.b64decode(value))
