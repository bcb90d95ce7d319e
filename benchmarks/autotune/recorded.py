"""Surfaces recorded on jobs: `recorded/*.json`, a full grid of settings with the seconds of some steps of each.

    {"schema": 1, "workload": "...", "ranks": 2, "environment": {...}, "default": {"cycle_time_ms": 5.0, ...},
     "axes": {"cycle_time_ms": [0, 0.1, 1, 10], "stores": ["cached", "streaming"], ...},
     "cells": [{"knobs": {"cycle_time_ms": 0, "stores": "cached", ...}, "samples": [0.101, ...]}, ...]}

The axes span the space. A 0 among positive numbers is the separate value for off; a scale of positive numbers is
logarithmic. Between the numbers of an axis, the logarithm of the median is interpolated multilinearly in the tuner's
coordinates, so the fastest setting is one of the grid. Steps scatter around it like those of the nearest cell around
their median.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.space import Choice, Integer, Knob, Knobs, Real, Space

Array = NDArray[np.float64]

SCHEMA = 1
FOLDER = Path(__file__).resolve().parent / "recorded"
PREFIX = "recorded:"
"""Prefix of these surfaces' names."""
INTEGERS = ("fusion_threshold", "chunk_bytes")
LEAST = 3  # minimum samples of a cell


class RecordingError(ValueError):
    """Error of a file that is not a recording; the text names the file, the error and its position."""


@dataclass(frozen=True)
class Axis:
    """Values of one knob, in the order of the grid."""

    knob: Knob
    values: list[Any]
    numbers: list[int]  # positions in `values` of those on a scale, in ascending order of the values
    shares: Array  # float64: position of each of these between the least and the greatest, 0 to 1

    @classmethod
    def from_values(cls, name: str, values: list[Any]) -> Axis:
        """Create the axis of these values."""
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            numbers = sorted((k for k, value in enumerate(values) if value), key=lambda k: values[k])
            off = 0 if len(numbers) < len(values) and values[numbers[0]] > 0 else None
            if off is None:
                numbers = sorted(range(len(values)), key=lambda k: values[k])
            low, high = values[numbers[0]], values[numbers[-1]]
            kind = Integer if name in INTEGERS else Real
            knob = kind(low, high, log=low > 0, off=off)
            return cls(knob, values, numbers, np.array([knob.encode(values[k])[0] for k in numbers]))
        return cls(Choice(values), values, [], np.empty(0))

    def find_neighbours(self, value: Any) -> list[tuple[int, float]]:
        """Return the grid's values around one, with their weights."""
        if isinstance(self.knob, Choice) or value == self.knob.off:
            return [(next(k for k, each in enumerate(self.values) if each == value), 1.0)]
        share = min(max(self.knob.encode(value)[0], 0.0), 1.0)
        right = int(np.clip(np.searchsorted(self.shares, share), 1, len(self.shares) - 1))
        left = right - 1
        weight = float((share - self.shares[left]) / (self.shares[right] - self.shares[left]))
        return [(self.numbers[left], 1.0 - weight), (self.numbers[right], weight)]


class RecordedSurface:
    """Surface as it was measured, from the content of a file; `name` is the file's, for errors.

    Raises `RecordingError` for another schema, an incomplete grid, or missing or invalid content.
    """

    def __init__(self, content: Mapping[str, Any], name: str) -> None:
        try:
            if content["schema"] != SCHEMA:
                raise RecordingError(f"schema {content['schema']!r}, where {SCHEMA} is read")
            self.workload, self.ranks = str(content["workload"]), int(content["ranks"])
            self.environment = dict(content["environment"])
            self._axes = {knob: Axis.from_values(knob, list(values)) for knob, values in content["axes"].items()}
            self.space = Space(**{knob: axis.knob for knob, axis in self._axes.items()})
            self.default = self.space.check(content["default"], "the default")
            self._fill_grid(content["cells"])
        except RecordingError as error:
            raise RecordingError(f"{name}: {error}") from None
        except KeyError as error:
            raise RecordingError(f"{name} lacks {error}") from None
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise RecordingError(f"{name}: {error}") from error
        self.least = float(np.exp(self._logs.min()))  # seconds of the fastest setting

    def _fill_grid(self, cells: Sequence[Mapping[str, Any]]) -> None:
        shape = [len(axis.values) for axis in self._axes.values()]
        self._logs = np.full(shape, np.nan)
        self._scatter: dict[tuple[int, ...], Array] = {}
        for number, cell in enumerate(cells):
            knobs = cell["knobs"]
            if knobs.keys() != self._axes.keys():
                raise RecordingError(f"cell {number} has the knobs {sorted(knobs)}, the axes are {sorted(self._axes)}")
            for knob, axis in self._axes.items():
                if knobs[knob] not in axis.values:
                    raise RecordingError(f"cell {number} has {knob}={knobs[knob]!r}, which is not on its axis")
            place = tuple(axis.values.index(knobs[knob]) for knob, axis in self._axes.items())
            if place in self._scatter:
                raise RecordingError(f"cell {number} is of the same setting as another: {knobs}")
            samples = np.array(cell["samples"], dtype=np.float64)
            if len(samples) < LEAST or not (np.isfinite(samples) & (samples > 0)).all():
                raise RecordingError(f"cell {number} needs at least {LEAST} samples, in seconds, positive and finite")
            logs = np.log(samples)
            self._logs[place] = np.median(logs)
            self._scatter[place] = logs - np.median(logs)
        if len(self._scatter) < math.prod(shape):
            place = np.argwhere(np.isnan(self._logs))[0]
            lacks = {knob: axis.values[k] for (knob, axis), k in zip(self._axes.items(), place, strict=True)}
            raise RecordingError(f"{math.prod(shape) - len(self._scatter)} cells are missing, the first is {lacks}")

    def compute_seconds(self, knobs: Knobs) -> float:
        """Return the seconds of a step, without noise."""
        corners = [axis.find_neighbours(knobs[knob]) for knob, axis in self._axes.items()]
        log = 0.0
        for corner in itertools.product(*corners):
            log += math.prod(weight for _, weight in corner) * float(self._logs[tuple(k for k, _ in corner)])
        return math.exp(log)

    def draw_steps(self, knobs: Knobs, n: int, rng: np.random.Generator) -> Array:
        """Return the seconds of `n` steps: shape (n,)."""
        corners = [axis.find_neighbours(knobs[knob]) for knob, axis in self._axes.items()]
        nearest = tuple(max(corner, key=lambda each: each[1])[0] for corner in corners)
        return np.asarray(self.compute_seconds(knobs) * np.exp(rng.choice(self._scatter[nearest], n)))


def write(
    workload: str,
    ranks: int,
    environment: Mapping[str, Any],
    default: Knobs,
    axes: Mapping[str, Sequence[Any]],
    cells: Sequence[Mapping[str, Any]],
) -> Path:
    """Write a grid as a surface with the name of the workload, replacing an earlier one.

    Raises `RecordingError` if the grid is not complete.
    """
    head = {
        "schema": SCHEMA,
        "workload": workload,
        "ranks": ranks,
        "environment": dict(environment),
        "default": {name: default[name] for name in axes},
        "axes": {name: list(values) for name, values in axes.items()},
    }
    rounded = [{**cell, "samples": [float(f"{sample:.6g}") for sample in cell["samples"]]} for cell in cells]
    path = FOLDER / f"{workload}.json"
    RecordedSurface({**head, "cells": rounded}, str(path))
    lines = ",\n  ".join(map(json.dumps, rounded))
    text = json.dumps(head, indent=1).removesuffix("\n}") + f',\n "cells": [\n  {lines}\n ]\n}}\n'
    FOLDER.mkdir(exist_ok=True)
    partial = path.with_suffix(".json.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
    read.cache_clear()
    return path


def set_folder(folder: Path) -> None:
    """Set the folder of recordings, in a process that has not inherited it."""
    global FOLDER
    FOLDER = folder


def list_names() -> tuple[str, ...]:
    """Return the names of the surfaces with recordings."""
    return tuple(PREFIX + path.stem for path in sorted(FOLDER.glob("*.json")))


@lru_cache
def read(path: Path) -> RecordedSurface:
    """Read a recording; raise `RecordingError` if the file is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RecordingError(f"{path}: {error}") from error
    return RecordedSurface(content, str(path))


def read_surface(name: str) -> RecordedSurface:
    """Return the recording for a surface's name."""
    return read(FOLDER / f"{name.removeprefix(PREFIX)}.json")
