"""Log of a search: JSON lines, appended one at a time, each with its number. Every row is complete or missing.

| row | what it holds |
|---|---|
| `open` | seed, space, default, trials, settings of the policy; schema, time, environment, what the search is about |
| `ask` | a trial: its id, knobs, phase, the reason, the limit in seconds |
| `tell` | its status and every raw sample, in seconds; perhaps `exposed`, the share of a step spent waiting |
| `observe` | samples of what is deployed, after the search; perhaps `steps`, how many have passed |
| `decide` | a decision: `deploy`, `finish` (with `final`), `rest`, `resume` or `reopen`; the knobs and the reason |
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.bounded_reader import MIB, ReadError, parse_json, read_bytes, shorten_text
from autotune.space import Space

SCHEMA = 1
LIMIT = 256 * MIB  # bytes of a log
NAMES: dict[type, str] = {int: "a whole number", str: "text", dict: "an object", list: "a list"}
FIELDS: dict[str, dict[str, type]] = {
    "open": {"seed": int, "max_trials": int, "space": dict, "default": dict, "first": list, "settings": dict},
    "ask": {"id": int, "knobs": dict, "phase": str, "why": str},
    "tell": {"id": int, "status": str, "samples": list},
    "observe": {"samples": list},
    "decide": {"decision": str, "knobs": dict, "why": str},
}
MAYBE: dict[str, type] = {"about": dict, "environment": dict}  # optional fields
NUMBERS = ("limit", "gap", "deviation", "trials", "steps")  # optional fields that are numbers
WORDS = {
    "phase": ("default", "design", "search", "confirm"),
    "status": ("ok", "aborted"),
    "decision": ("deploy", "finish", "rest", "resume", "reopen"),
}


class JournalError(ValueError):
    """Error of a log that cannot be read; the text names the line and what was expected there."""


class Journal:
    """Log of one search: appends rows to a new file, created with mode 0600.

    `about` describes the search in JSON's types: model, world size, transport. Raises FileExistsError if the file
    exists.
    """

    def __init__(self, path: str | os.PathLike[str], about: Mapping[str, Any] | None = None) -> None:
        self.path = Path(path)
        self._about = dict(about or {})
        self._number = 0
        try:
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise FileExistsError(f"{self.path} exists, and a log holds one search: give another name") from None

    def __call__(self, row: dict[str, Any]) -> None:
        """Append a row. It is in the kernel when this returns, so it survives the death of the process."""
        full = {"n": self._number, **row}
        if row["row"] == "open":
            full |= {"schema": SCHEMA, "time": time.time(), "environment": describe_environment(), "about": self._about}
        line = memoryview(json.dumps(full, allow_nan=False).encode() + b"\n")
        while line:
            line = line[os.write(self._file, line) :]
        self._number += 1

    def close(self) -> None:
        """Close the file; nothing more can be appended."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def describe_environment() -> dict[str, str]:
    """Return the versions and the processor, on which the last bits of a calculation depend."""
    versions = {name: importlib.metadata.version(name) for name in ("numpy", "scipy")}
    return {
        "python": platform.python_version(),
        **versions,
        "machine": platform.machine(),
        "processor": read_processor_model(),
    }


def read_processor_model() -> str:
    """Return the model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return all rows of a log.

    Raises JournalError if the file is not a log, has a newer schema, is truncated, or has rows out of order.
    """
    try:
        data = read_bytes(path, LIMIT)
    except ReadError as error:
        raise JournalError(str(error)) from None
    if not data.strip():
        raise JournalError(f"{path} is empty: a log begins with a row 'open'")
    lines = data.split(b"\n")
    rows: list[dict[str, Any]] = []
    search: _Search | None = None
    for number, line in enumerate(lines[:-1], start=1):
        where = f"{path}, line {number}"
        rows.append(_parse_row(line, where, number - 1))
        try:
            search = _Search(rows[0]) if search is None else search.accept_row(rows[-1])
        except ValueError as error:
            raise JournalError(f"{where}: {error}") from None
    if lines[-1]:
        raise JournalError(
            f"{path}, line {len(lines)}: truncated, a row ends with a line break. The {len(rows)} rows before it are "
            f"whole: head -n {len(rows)} keeps them"
        )
    if not rows:
        raise JournalError(f"{path}, line 1: truncated, a row ends with a line break")
    return rows


class _Search:
    """State by which a search's next row is checked: the space, and the trials without a result."""

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._space = Space.from_description(head["space"])
        self._space.check(head["default"], "the default")
        for k, knobs in enumerate(head["first"]):
            if not isinstance(knobs, dict):
                raise ValueError(f"expected setting {k} of 'first' to be an object, not {knobs!r}")
            self._space.check(knobs, f"setting {k} of 'first'")
        for name, value in head["settings"].items():
            if not _is_number(value):
                raise ValueError(f"expected the setting {name!r} to be a number, not {value!r}")
        self._asked: set[int] = set()
        self._waiting: set[int] = set()

    def accept_row(self, row: Mapping[str, Any]) -> _Search:
        """Accept the next row; raise ValueError if it cannot follow."""
        kind = row["row"]
        if "knobs" in row:
            self._space.check(row["knobs"], f"the setting of a row {kind!r}")
        if kind == "ask":
            if row["id"] in self._asked:
                raise ValueError(f"expected a new trial, but trial {row['id']} was asked for before")
            self._asked.add(row["id"])
            self._waiting.add(row["id"])
        elif kind == "tell":
            if row["id"] not in self._waiting:
                waiting = ", ".join(map(str, sorted(self._waiting))) or "none"
                raise ValueError(f"expected a trial that waits to be told ({waiting}), not trial {row['id']}")
            self._waiting.remove(row["id"])
        return self


def _is_number(value: Any) -> bool:
    """Return whether a value is a number, which `parse_json` has bounded."""
    return type(value) in (int, float)


def _parse_row(line: bytes, where: str, number: int) -> dict[str, Any]:
    """Parse and check one row."""
    try:
        row = parse_json(line)
    except ReadError as error:
        hint = "" if number else " Is this a log of the tuner? One begins with a row 'open'."
        raise JournalError(f"{where}: expected a row in JSON, but: {error}.{hint}") from None
    kind = row.get("row") if isinstance(row, dict) else None
    if number == 0 and kind != "open":
        raise JournalError(f"{where}: expected a row 'open', as a log of the tuner begins, not {_shorten_line(line)}")
    if number == 0 and row.get("schema") != SCHEMA:
        newer = isinstance(row.get("schema"), int) and row["schema"] > SCHEMA
        advice = (
            "it was written by a newer version: upgrade, to read it" if newer else "it was not written by the tuner"
        )
        raise JournalError(f"{where}: expected schema {SCHEMA}, not {row.get('schema')!r}; {advice}")
    if not isinstance(kind, str) or kind not in FIELDS or (number > 0 and kind == "open"):
        others = ", ".join(repr(each) for each in FIELDS if each != "open")
        raise JournalError(f"{where}: expected a row of kind {others}, not {_shorten_line(line)}")
    if row.get("n") != number:
        have = row.get("n")
        raise JournalError(f"{where}: expected row n={number}, not n={have!r}: rows are missing, or not in order")
    for field, kind_ in FIELDS[kind].items():
        if field not in row:
            raise JournalError(f"{where}: expected a field {field!r} in a row {kind!r}")
        if not isinstance(row[field], kind_) or isinstance(row[field], bool):
            raise JournalError(f"{where}: expected {field!r} to be {NAMES[kind_]}, not {row[field]!r}")
    for field, kind_ in MAYBE.items():
        if not isinstance(row.get(field, {}), kind_):
            raise JournalError(f"{where}: expected {field!r} to be {NAMES[kind_]}, not {row[field]!r}")
    for field in NUMBERS:
        if not _is_number(row.get(field, 0)):
            raise JournalError(f"{where}: expected {field!r} to be a number, not {row[field]!r}")
    for field, words in WORDS.items():
        if row.get(field, words[0]) not in words:
            raise JournalError(f"{where}: expected {field!r} to be one of {', '.join(words)}, not {row[field]!r}")
    if "samples" in row and not row["samples"]:
        raise JournalError(f"{where}: expected at least one sample")
    for sample in row.get("samples", ()):
        if not _is_number(sample) or sample <= 0:
            shown = shorten_text(repr(sample))
            raise JournalError(f"{where}: expected samples in seconds, positive and finite, not {shown}")
    exposed = row.get("exposed", 0.0)
    if not _is_number(exposed) or not 0 <= exposed <= 1:
        raise JournalError(f"{where}: expected 'exposed' to be a share, 0 to 1, not {exposed!r}")
    return dict(row)


def _shorten_line(line: bytes) -> str:
    return shorten_text(repr(line[:200].decode("utf-8", "replace")))
