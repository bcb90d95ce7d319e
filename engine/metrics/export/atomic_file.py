"""Atomic replacement of files that others read at any moment, and removal by their writer only."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

MODE = 0o644  # Prometheus and node_exporter are other users


def replace(path: Path, content: bytes) -> None:
    """Replace a file atomically: a reader sees either the old content or the new.

    Raises OSError if the file cannot be written; the old content stays.
    """
    # The draft matches neither `*.json` nor `*.prom`, and two writers have different drafts.
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
    """Remove a file if it contains `mark`, bytes of our file alone: another job may have replaced it. Never raises."""
    with contextlib.suppress(OSError):
        if mark in path.read_bytes():
            path.unlink()


def check_directory(path: Path) -> str | None:
    """Explain why the file `path` cannot be written to its directory; return None if it can."""
    if not path.parent.is_dir():
        return f"there is no directory {str(path.parent)!r}: make it"
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return f"the directory {str(path.parent)!r} may not be written to: choose another, or change its mode"
    return None
