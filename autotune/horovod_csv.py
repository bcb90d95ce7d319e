"""Log of Horovod's autotuner: a CSV file with a row for each sample, scored in bytes per microsecond."""

from __future__ import annotations

import csv
import io
import os
from dataclasses import dataclass
from pathlib import Path

from autotune.bounded_reader import ReadError, parse_decimal, read_bytes, shorten_text
from autotune.journal import LIMIT, JournalError
from autotune.space import Knobs

HEADER = "hierarchical_allreduce,hierarchical_allgather,cache_enabled,cycle_time_ms,tensor_fusion_threshold,score"
MEBIBYTE = 1 << 20
LARGEST = 1e15


@dataclass(frozen=True)
class HorovodSample:
    """One row: the knobs in our names and units, and the score, of which more is better."""

    line: int
    knobs: Knobs
    score: float


def is_horovod_log(path: str | os.PathLike[str]) -> bool:
    """Return whether a file begins like such a log."""
    try:
        begin = read_bytes(path, LIMIT)[:4096]
    except ReadError as error:
        raise JournalError(str(error)) from None
    return b"tensor_fusion_threshold" in begin.partition(b"\n")[0]


def read(path: str | os.PathLike[str]) -> list[HorovodSample]:
    """Return all samples of such a log.

    Raises JournalError if a column is missing, or a value is not a number; the text names the line.
    """
    try:
        return _parse_samples(Path(path))
    except csv.Error as error:
        raise JournalError(f"{path}: expected a CSV file: {error}") from None
    except ReadError as error:
        raise JournalError(str(error)) from None


def _parse_samples(path: Path) -> list[HorovodSample]:
    with io.StringIO(read_bytes(path, LIMIT).decode(errors="replace"), newline="") as file:
        rows = csv.DictReader(file)
        missing = [name for name in HEADER.split(",") if name not in (rows.fieldnames or ())]
        if missing:
            raise JournalError(f"{path}, line 1: expected the columns {HEADER}; {', '.join(missing)} are missing")
        samples = []
        for row in rows:
            values: dict[str, float] = {}
            for name in HEADER.split(","):
                value = parse_decimal((row[name] or "").strip(), LARGEST)
                if value is None or value < 0:
                    where = f"{path}, line {rows.line_num}"
                    raise JournalError(f"{where}: expected a number in each column, not {shorten_text(str(row))}")
                values[name] = value
            threshold = round(values["tensor_fusion_threshold"] * MEBIBYTE)
            knobs = {"fusion_threshold": threshold, "cycle_time_ms": values["cycle_time_ms"]}
            samples.append(HorovodSample(rows.line_num, knobs, values["score"]))
    if not samples:
        raise JournalError(f"{path}, line 2: expected a sample: the run was shorter than the warm-up")
    return samples


def find_best_sample(samples: list[HorovodSample]) -> HorovodSample:
    """Return the sample with the highest score. It was measured once; the log has no information on its certainty."""
    return max(samples, key=lambda sample: sample.score)
