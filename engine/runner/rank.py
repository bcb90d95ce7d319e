"""A rank of `engine.run`: `python -m engine.runner.rank SHA256` makes the call stored in the job's directory.

The stored call is unpickled only if it has that digest: others may be able to write into the directory.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import traceback
from pathlib import Path

from ..host import private_files
from ..launch.hosts.remote_files import ENCLOSED
from ..launch.process.leftovers import ERROR, RESULT
from .function import find_pickler


def main() -> None:
    """Call the function, and write its result or its traceback into the directory of this rank."""
    rank, directory = os.environ["ENGINE_RANK"], Path(os.environ["ENGINE_OUTPUT_DIR"])
    own = directory / f"rank.{rank}"
    try:
        path, python, call = pickle.loads(_read_call(directory / ENCLOSED, sys.argv[1]))
        # Another Python has packages of its own, which come first.
        sys.path[:] = path if python == sys.executable else dict.fromkeys([*sys.path, *path])
        func, args, kwargs = pickle.loads(call)
        value = func(*args, **kwargs)
        data = _pickle_result(value, rank)
    except Exception:
        private_files.write(own / ERROR, traceback.format_exc().encode(errors="backslashreplace"))
        raise
    private_files.write(own / RESULT, data)


def _read_call(path: Path, digest: str) -> bytes:
    """Read the pickled call; raise a `RuntimeError` if its digest differs from the caller's."""
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != digest:
        raise RuntimeError(f"{path} is not what engine.run has written there: choose an output_filename of your own")
    return data


def _pickle_result(value: object, rank: str) -> bytes:
    try:
        data: bytes = find_pickler().dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(f"the result of rank {rank}, of type {type(value).__qualname__}, cannot be pickled") from error
    return data


if __name__ == "__main__":
    main()
