"""What a task says of its rank's end: how it came, and the files that the rank has left."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..host import stacks
from ..launch.leftovers import ERROR, RESULT
from ..launch.verdict import End

STDERR = "stderr"
HEAD = "end"
SMALL = ("failure.json", "traceback.txt", stacks.NAME, ERROR)  # files that explain a failure
MOST = 1 << 20  # bytes of each of them
SCHEMA = "name string, data binary"
"""Of the rows that a task gives back: a file each, and its `HEAD` first."""


@dataclass(frozen=True)
class Record:
    """The end of a rank.

    Attributes
    ----------
    rank : int
    host : str
        As messages name it.
    end : End
    files : mapping of str to bytes
        By name: what the rank left, and the end of its stderr.
    """

    rank: int
    host: str
    end: End
    files: Mapping[str, bytes]

    @classmethod
    def of(cls, host: str, end: End, directory: Path, stderr: bytes) -> Record:
        """Collect what a rank has left in its directory."""
        files = {STDERR: stderr} if stderr else {}
        for name in (*SMALL, RESULT):
            path = directory / name
            if path.exists():
                data = path.read_bytes()
                files[name] = data if name == RESULT else data[-MOST:]
        return cls(end.rank, host, end, files)

    def head(self) -> dict[str, Any]:
        """The end as JSON has it; its time as an age, since clocks differ between hosts."""
        end, now = self.end, time.time()
        return {
            "rank": end.rank,
            "host": self.host,
            "code": end.code,
            "age": now - end.time,
            "by_launcher": end.by_launcher,
        }

    def explanation(self) -> bytes:
        """The files that explain a failure, as `read` takes them."""
        return json.dumps(
            {name: data.decode("latin-1") for name, data in self.files.items() if name != RESULT}
        ).encode()

    @classmethod
    def read(cls, head: Mapping[str, Any], files: Mapping[str, bytes]) -> Record:
        """A record from what `head` has given."""
        rank, code = int(head["rank"]), int(head["code"])
        end = End(rank, code, time.time() - float(head["age"]), bool(head["by_launcher"]))
        return cls(rank, str(head["host"]), end, files)

    @classmethod
    def read_explanation(cls, head: Mapping[str, Any], explanation: bytes) -> Record:
        """A record from what `head` and `explanation` have given."""
        return cls.read(head, {name: text.encode("latin-1") for name, text in json.loads(explanation).items()})

    def rows(self) -> list[tuple[str, bytes]]:
        """The record as rows of `SCHEMA`."""
        return [(HEAD, json.dumps(self.head()).encode()), *((name, data) for name, data in self.files.items())]

    def write(self, directory: Path) -> None:
        """Lay the files out as the launcher's reports look for them."""
        home = directory / f"rank.{self.rank}"
        os.makedirs(home, mode=0o700, exist_ok=True)
        for name, data in self.files.items():
            (home / name).write_bytes(data)


def read_rows(rows: Iterable[tuple[str, bytes]]) -> dict[int, Record]:
    """The records of all tasks, by rank, from their rows: those of a task follow each other."""
    records: dict[int, Record] = {}
    head: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    for name, data in rows:
        if name == HEAD:
            head, files = json.loads(data), {}
            records[int(head["rank"])] = Record.read(head, files)
        else:
            files[name] = bytes(data)
    return records
