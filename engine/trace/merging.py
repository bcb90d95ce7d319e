"""Merging of the timelines of several ranks into one file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from ..host import private_files
from . import worlds
from .reading import events_of, files_of, read


def merge(paths: Iterable[str | Path], target: Path, notes: list[str]) -> int:
    """Merge the timelines of several ranks into one file and return the number of events.

    A directory of an elastic job stands for all its worlds; the merged file has one track for each worker. Errors are
    those of `read`, and OSError if the target cannot be written.
    """
    given = worlds.expand_worlds(paths)
    if worlds.is_of_worlds(given):
        events = worlds.merge_worlds(given, notes)
    else:
        read(given, notes)  # They belong together.
        events = (event for path in files_of(given) for event in events_of(path, []))
    count = 0
    with open(private_files.open_file(target, os.O_TRUNC), "w", encoding="utf-8") as file:
        for event in events:
            file.write((",\n" if count else "[") + json.dumps(event, separators=(",", ":"), ensure_ascii=False))
            count += 1
        file.write("\n]\n")
    return count
