"""A rank of `engine.run`: `python -m engine.runner.rank` makes the call that lies in the job's directory."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from pathlib import Path

from ..launch.remote_files import ENCLOSED
from .function import ERROR, RESULT, pickler


def main() -> None:
    """Call the function, and write its result or its traceback into the directory of this rank."""
    rank, directory = os.environ["ENGINE_RANK"], Path(os.environ["ENGINE_OUTPUT_DIR"])
    own = directory / f"rank.{rank}"
    try:
        path, same_python, call = pickle.loads((directory / ENCLOSED).read_bytes())
        sys.path[:] = path if same_python else dict.fromkeys([*sys.path, *path])
        func, args, kwargs = pickle.loads(call)
        value = func(*args, **kwargs)
        data = _dumps(value, rank)
    except Exception:
        (own / ERROR).write_bytes(traceback.format_exc().encode(errors="backslashreplace"))
        raise
    (own / RESULT).write_bytes(data)


def _dumps(value: object, rank: str) -> bytes:
    try:
        data: bytes = pickler().dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(f"the result of rank {rank}, of type {type(value).__qualname__}, cannot be pickled") from error
    return data


if __name__ == "__main__":
    main()
