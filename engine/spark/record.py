"""Record of a rank's end, which its task reports: how the rank ended, and the files that it has left."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..exit_report.report import ExitReport
from ..host import private_files, stacks
from ..launch.process.leftovers import ERROR, RESULT
from ..launch.process.rank_end import RankEnd
from ..net import frames
from ..text import readable
from ..text.bounded_reader import get_number, get_whole

STDERR = "stderr"
HEAD = "end"
SMALL = ("failure.json", "traceback.txt", stacks.NAME, ERROR)  # files that explain a failure
MOST = 1 << 20  # bytes that are kept of the end of each of them
FILES = frozenset((STDERR, RESULT, *SMALL))
"""Allowed names of files in a task's message."""
SCHEMA = "name string, data binary"
"""Schema of the rows that a task returns: its `HEAD` first, then one file each."""


@dataclass(frozen=True)
class RankRecord:
    """End of a rank."""

    rank: int
    host: str  # name of the host for messages
    end: RankEnd
    files: Mapping[str, bytes]  # files that the rank left, and the end of its stderr, by name

    @classmethod
    def from_directory(cls, host: str, end: RankEnd, directory: Path, stderr: bytes) -> RankRecord:
        """Collect the files that a rank has left in its directory."""
        files = {STDERR: stderr} if stderr else {}
        for name in (*SMALL, RESULT):
            path = directory / name
            if path.exists():
                data = path.read_bytes()
                files[name] = data if name == RESULT else data[-MOST:]
        return cls(end.rank, host, end, files)

    def to_head(self) -> dict[str, Any]:
        """Return the end as a JSON object. Its time is given as an age, since clocks differ between hosts."""
        end, now = self.end, time.time()
        return {
            "rank": end.rank,
            "host": self.host,
            "code": end.code,
            "age": now - end.time,
            "by_launcher": end.by_launcher,
            "report": end.report.to_bytes().decode(),
            "files": {name: len(data) for name, data in self.files.items() if name != RESULT},
        }

    def join_explanations(self) -> bytes:
        """Return the concatenated files that explain a failure; `to_head` has their names and sizes."""
        return b"".join(data for name, data in self.files.items() if name != RESULT)

    @classmethod
    def read(cls, head: Mapping[str, Any], files: Mapping[str, bytes]) -> RankRecord:
        """Create a record from the result of `to_head`.

        Raises ValueError if a file has a name that a rank does not use, or a field is invalid.
        """
        rank, code, age = (
            get_whole(head, "rank"),
            get_whole(head, "code", -128, 255),
            get_number(head, "age", -1e9, 1e9),
        )
        if unknown := files.keys() - FILES:
            raise ValueError(f"rank {rank} leaves no file {min(unknown)!r}")
        report = ExitReport.parse(str(head.get("report")).encode(errors="replace"))
        end = RankEnd(rank, code, time.time() - age, bool(head.get("by_launcher")), report=report)
        return cls(rank, readable.replace_unprintable(str(head.get("host"))), end, files)

    @classmethod
    def read_explanation(cls, head: Mapping[str, Any], explanation: bytes) -> RankRecord:
        """Create a record from the results of `to_head` and `join_explanations`. Raises the same errors as `read`."""
        files: dict[str, bytes] = {}
        place = 0
        sizes = head.get("files", {})
        if not isinstance(sizes, dict):
            raise ValueError(f"files {readable.replace_unprintable(repr(sizes)[:100])}, which are no names with sizes")
        for name, size in sizes.items():
            if type(size) is not int or not 0 <= size <= len(explanation) - place:
                raise ValueError(f"a file {name!r} of {size!r} bytes, and {len(explanation) - place} are left")
            files[name] = explanation[place : place + size]
            place += size
        return cls.read(head, files)

    def to_rows(self) -> list[tuple[str, bytes]]:
        """Return the record as rows of `SCHEMA`."""
        return [(HEAD, json.dumps(self.to_head()).encode()), *((name, data) for name, data in self.files.items())]

    def write(self, directory: Path) -> None:
        """Write the files into the layout that the launcher's reports expect."""
        home = directory / f"rank.{self.rank}"
        private_files.make_directory(home)
        for name, data in self.files.items():
            if name not in FILES:
                raise ValueError(f"rank {self.rank} leaves no file {name!r}")
            private_files.write(home / name, data)


def read_rows(rows: Iterable[tuple[str, bytes]]) -> dict[int, RankRecord]:
    """Return the records of all tasks by rank, from their rows; those of a task are consecutive."""
    records: dict[int, RankRecord] = {}
    head: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    for name, data in rows:
        if name == HEAD:
            head, files = frames.parse_object(bytes(data)), {}
            record = RankRecord.read(head, files)
            records[record.rank] = record
        elif name in FILES:
            files[name] = bytes(data)
        else:
            raise ValueError(f"a task leaves no file {name!r}")
    return records
