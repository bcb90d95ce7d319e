"""A rank of `engine.run`: `python -m engine.runner.rank DIRECTORY` makes the call that lies there."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from pathlib import Path

from .function import CALL, ERROR, RESULT, pickler


def main(home: Path) -> None:
    """Call the function, and write its result or its traceback.

    Parameters
    ----------
    home : Path
        The directory of the call, which only this user can read.
    """
    rank = os.environ["ENGINE_RANK"]
    try:
        path, same_python, call = pickle.loads((home / CALL).read_bytes())
        sys.path[:] = path if same_python else dict.fromkeys([*sys.path, *path])
        func, args, kwargs = pickle.loads(call)
        value = func(*args, **kwargs)
        data = _dumps(value, rank)
    except Exception:
        (home / ERROR.format(rank)).write_bytes(traceback.format_exc().encode(errors="backslashreplace"))
        raise
    (home / RESULT.format(rank)).write_bytes(data)


def _dumps(value: object, rank: str) -> bytes:
    try:
        data: bytes = pickler().dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(f"the result of rank {rank}, of type {type(value).__qualname__}, cannot be pickled") from error
    return data


if __name__ == "__main__":
    main(Path(sys.argv[1]))
