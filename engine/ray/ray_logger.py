"""`log`: hands a value to the callbacks of `ElasticRayExecutor.run`, under Horovod's name."""

from __future__ import annotations

import base64
from typing import Any

from ray import cloudpickle

from .. import place
from ..elastic.worker import run

__all__ = ["log"]


def log(info: Any) -> None:
    """Have the caller's callbacks called with a value. Does nothing on ranks other than 0, and outside an elastic job.

    Parameters
    ----------
    info : object
        It is pickled, and has about 500 KiB at most then.
    """
    if place.rank() == 0:
        run.log(base64.b64encode(cloudpickle.dumps(info)).decode())


def logged(value: str) -> Any:
    """What a worker has logged, on the caller's side."""
    return cloudpickle.loads(base64.b64decode(value))
