"""Files that others read at any moment: never half written, and taken away only by whoever wrote them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

MODE = 0o644  # Prometheus and node_exporter are other users


def replace(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, and nothing between.

    Parameters
    ----------
    path : Path
        The file; earlier content is overwritten.
    content : bytes

    Raises
    ------
    OSError
        It cannot be written; what was there is still there.
    """
    # Neither `*.json` nor `*.prom` matches it, and two writers have two.
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, MODE)
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, MODE)  # whatever the umask
            file.write(content)
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def remove(path: Path, mark: bytes) -> None:
    """Remove a file, if it is ours; another job may have written its own there. Raises nothing.

    Parameters
    ----------
    path : Path
    mark : bytes
        What the file then contains.
    """
    with contextlib.suppress(OSError):
        if mark in path.read_bytes():
            path.unlink()


def check_directory(path: Path) -> str | None:
    """Say what is wrong with the directory of a file that is to be written; None if nothing is.

    Parameters
    ----------
    path : Path
        The file.

    Returns
    -------
    str or None
    """
    if not path.parent.is_dir():
        return f"there is no directory {str(path.parent)!r}: make it"
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return f"the directory {str(path.parent)!r} may not be written to: choose another, or change its mode"
    return None
