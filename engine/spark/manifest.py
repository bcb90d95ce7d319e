"""Manifest of a data set: its valid files, the number of rows of each row group, and the type of each column.

It is made of the results of the tasks that wrote the files. Files that it does not name are ignored: they come from
tasks that were retried or run twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

NAME = "manifest.json"
TRAIN, VALIDATION = "train", "validation"


class DataError(ValueError):
    """Rows cannot be trained on. The text names the column, and says what to do."""


@dataclass(frozen=True)
class Part:
    """Parquet file of a data set."""

    name: str  # path below the directory of the data set
    split: str  # `TRAIN` or `VALIDATION`
    groups: tuple[int, ...]  # number of rows of each row group
    lengths: Mapping[str, int]  # length of the lists of each column; 0 for numbers


@dataclass(frozen=True)
class Manifest:
    """Description of a data set."""

    parts: tuple[Part, ...]
    lengths: Mapping[str, int]  # same as in `Part`

    def count_rows(self, split: str = TRAIN) -> int:
        """Return the number of rows of a split."""
        return sum(sum(part.groups) for part in self.parts if part.split == split)

    def list_groups(self, split: str = TRAIN) -> list[tuple[str, int, int]]:
        """Return the non-empty row groups of a split: file, number in the file, number of rows."""
        return [
            (part.name, number, rows)
            for part in self.parts
            if part.split == split
            for number, rows in enumerate(part.groups)
            if rows
        ]

    def to_json(self) -> str:
        """Return the manifest as JSON, for `read`."""
        return json.dumps({"parts": [asdict(part) for part in self.parts], "lengths": dict(self.lengths)})

    @classmethod
    def read(cls, text: str | bytes) -> Manifest:
        """Parse a manifest that `to_json` has written."""
        found = json.loads(text)
        parts = [Part(**part | {"groups": tuple(part["groups"])}) for part in found["parts"]]
        return cls(tuple(parts), found["lengths"])

    @classmethod
    def combine_parts(cls, parts: Iterable[Part]) -> Manifest:
        """Combine the files that tasks have written.

        Raises DataError if there is no row, or a column's lists have different lengths in two files.
        """
        ordered = tuple(sorted(parts, key=lambda part: part.name))
        if not any(part.groups for part in ordered):
            raise DataError("the DataFrame has no rows to train on")
        lengths: dict[str, int] = {}
        for part in ordered:
            for column, length in part.lengths.items():
                check_length(column, lengths.setdefault(column, length), length)
        return cls(ordered, lengths)


def check_length(column: str, expected: int, found: int) -> None:
    """Raise DataError for lists of different lengths."""
    if expected != found:
        raise DataError(
            f"column {column!r} has lists of {min(expected, found)} and of {max(expected, found)} values: all rows "
            "need as many; pad or cut them"
        )


def of_parquet(fs: Any, path: str, columns: Sequence[str], split: str = TRAIN) -> Manifest:
    """Create the manifest of Parquet files that another program has written.

    `fs` is a file system of fsspec, and `path` a directory of it. Names that begin with `.` or `_` are ignored. Raises
    DataError if there are no files with rows, or a column is missing. A column must have numbers or lists of numbers,
    and not integers in one file and fractions in another.
    """
    import pyarrow.parquet as pq

    from .columns import integers_of, lengths_of

    parts: list[Part] = []
    kinds: dict[str, tuple[bool, str]] = {}
    for file in sorted(fs.find(path)):
        name = file[len(path.rstrip("/")) :].lstrip("/")
        if not name.endswith(".parquet") or any(step.startswith((".", "_")) for step in name.split("/")):
            continue
        with fs.open(file, "rb") as opened:
            parquet = pq.ParquetFile(opened)
            groups = tuple(parquet.metadata.row_group(n).num_rows for n in range(parquet.num_row_groups))
            missing = [column for column in columns if column not in parquet.schema_arrow.names]
            if missing:
                raise DataError(f"{file} has no column {missing[0]!r}; it has {', '.join(parquet.schema_arrow.names)}")
            first = next((number for number, rows in enumerate(groups) if rows), None)
            if first is not None:
                table = parquet.read_row_group(first, columns=list(columns))
                parts.append(Part(name, split, groups, lengths_of(table)))
                for column, integers in integers_of(table).items():
                    expected, other = kinds.setdefault(column, (integers, file))
                    if integers != expected:
                        pair = (file, other) if integers else (other, file)
                        raise DataError(
                            f"column {column!r} has integers in {pair[0]} and fractions in {pair[1]}: write all files "
                            "with one schema"
                        )
    if not parts:
        raise DataError(f"there are no Parquet files with rows in {path}")
    return Manifest.combine_parts(parts)
