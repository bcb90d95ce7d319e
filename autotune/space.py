"""Space of settings: knobs, their values, and coordinates in the unit cube, where distances are measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Knobs = dict[str, Any]
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Real:
    """Number between `low` and `high`.

    Parameters
    ----------
    low, high : float
        Bounds, both included.
    log : bool
        Whether distances are ratios: from 1 to 2 is as far as from 10 to 20.
    off : float, optional
        Additional value apart from the range, which turns the feature off, such as 0 for a time on a log scale.
    """

    low: float
    high: float
    log: bool = False
    off: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"low must be below high, and both finite: low={self.low}, high={self.high}")
        if self.log and self.low <= 0:
            raise ValueError(
                f"a log scale begins above 0, not at {self.low}; is it a value that means off? then give off={self.low}"
            )
        if self.off is not None and self.low <= self.off <= self.high:
            raise ValueError(f"off={self.off} lies between low={self.low} and high={self.high}, so it is not apart")

    @property
    def width(self) -> int:
        """Number of columns in the unit cube."""
        return 1 if self.off is None else 2

    def encode(self, value: Any) -> list[float]:
        """Return the coordinates of a value: its position from low to high, and whether it is off."""
        if self.off is None:
            return [self._normalize_value(float(value))]
        return [0.0, 1.0] if value == self.off else [self._normalize_value(float(value)), 0.0]

    def decode(self, at: Sequence[float]) -> Any:
        """Return the value nearest to the coordinates, to four digits."""
        if self.off is not None and at[1] >= 0.5:
            return self.off
        share = min(max(float(at[0]), 0.0), 1.0)
        low, high = self._scale_value(self.low), self._scale_value(self.high)
        value = low + share * (high - low)
        return self._clamp_value(math.exp(value) if self.log else value)

    def encode_shares(self, shares: Array) -> Array:
        """Return coordinates, of shape (n, width), of values at `shares`, of shape (n,) and from 0 to 1."""
        if self.off is None:
            return self.snap_coordinates(shares[:, None])
        inside = (shares - OFF_SHARE) / (1.0 - OFF_SHARE)
        return self.snap_coordinates(np.stack([inside, (shares < OFF_SHARE).astype(np.float64)], axis=1))

    def snap_coordinates(self, at: Array) -> Array:
        """Return the nearest coordinates of valid values: shape (n, width) to the same."""
        share = np.clip(at[:, 0], 0.0, 1.0)
        if isinstance(self, Integer):
            low, high = self._scale_value(self.low), self._scale_value(self.high)
            value = np.rint(np.exp(low + share * (high - low)) if self.log else low + share * (high - low))
            value = np.clip(value, self.low, self.high)
            share = ((np.log(value) if self.log else value) - low) / (high - low)
        if self.off is None:
            return share[:, None]
        off = at[:, 1] >= 0.5
        return np.stack([np.where(off, 0.0, share), off.astype(np.float64)], axis=1)

    def error(self, value: Any) -> str | None:
        """Return the reason why a value is invalid; None if it is valid."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"it is a number, not {value!r}"
        if value != self.off and not self.low <= value <= self.high:
            off = "" if self.off is None else f", or {self.off}"
            return f"it is {self.low} to {self.high}{off}, not {value}"
        return None

    def _clamp_value(self, value: float) -> Any:
        return min(max(float(f"{value:.4g}"), self.low), self.high)

    def _scale_value(self, value: float) -> float:
        return math.log(value) if self.log else value

    def _normalize_value(self, value: float) -> float:
        """Return the position of a value between `low` (0) and `high` (1), on the parameter's scale."""
        low, high = self._scale_value(self.low), self._scale_value(self.high)
        return (self._scale_value(value) - low) / (high - low)


@dataclass(frozen=True)
class Integer(Real):
    """Whole number between `low` and `high`; see `Real`."""

    low: int
    high: int
    off: int | None = None

    def error(self, value: Any) -> str | None:
        """Return the reason why a value is invalid; None if it is valid."""
        if isinstance(value, float) and not value.is_integer():
            return f"it is a whole number, not {value}"
        return super().error(value)

    def _clamp_value(self, value: float) -> Any:
        return min(max(round(value), self.low), self.high)


@dataclass(frozen=True)
class Choice:
    """One of several values that are all equally far from each other.

    Parameters
    ----------
    values : list
        Values, at least two, all different: str, int, float or bool.
    """

    values: Sequence[Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(self.values))
        if len(self.values) < 2 or len(set(map(repr, self.values))) < len(self.values):
            raise ValueError(f"a choice is among two or more different values, not {list(self.values)!r}")
        if not all(isinstance(value, str | int | float | bool) for value in self.values):
            raise ValueError(f"the values of a choice are text, numbers or truth values, not {list(self.values)!r}")

    @property
    def width(self) -> int:
        """Number of columns in the unit cube: one for each value."""
        return len(self.values)

    def encode(self, value: Any) -> list[float]:
        """Return the coordinates of a value; any two values are 1 apart."""
        return [math.sqrt(0.5) * (repr(each) == repr(value)) for each in self.values]

    def decode(self, at: Sequence[float]) -> Any:
        """Return the value nearest to the coordinates."""
        return self.values[int(np.argmax(at))]

    def encode_shares(self, shares: Array) -> Array:
        """Return coordinates, of shape (n, width), of values at `shares`, of shape (n,) and from 0 to 1."""
        return self._encode_choices(np.minimum((shares * len(self.values)).astype(np.int64), len(self.values) - 1))

    def snap_coordinates(self, at: Array) -> Array:
        """Return the nearest coordinates of valid values: shape (n, width) to the same."""
        return self._encode_choices(np.argmax(at, axis=1))

    def _encode_choices(self, numbers: NDArray[np.int64]) -> Array:
        return np.where(numbers[:, None] == np.arange(len(self.values)), math.sqrt(0.5), 0.0)

    def error(self, value: Any) -> str | None:
        """Return the reason why a value is invalid; None if it is valid."""
        if repr(value) not in map(repr, self.values):
            return f"it is one of {', '.join(map(repr, self.values))}, not {value!r}"
        return None


Knob = Real | Integer | Choice
KINDS: dict[str, type[Real] | type[Choice]] = {"Real": Real, "Integer": Integer, "Choice": Choice}


class Space:
    """Knobs by name.

    Parameters
    ----------
    **knobs : Real, Integer or Choice
        Knobs by name, at least one.

    Examples
    --------
    >>> Space(cycle_time_ms=Real(0.05, 50.0, log=True, off=0.0), stores=Choice(["cached", "streaming"]))
    """

    def __init__(self, **knobs: Knob) -> None:
        if not knobs:
            raise ValueError("a space has at least one knob")
        for name, knob in knobs.items():
            if not isinstance(knob, Real | Choice):
                raise TypeError(f"knob {name!r} is Real, Integer or Choice, not {type(knob).__qualname__}")
        self.knobs: dict[str, Knob] = dict(knobs)
        columns = [(g, knob.width) for g, knob in enumerate(self.knobs.values())]
        #: Number of the knob to which each column of an encoded setting belongs.
        self.groups = np.array([g for g, width in columns for _ in range(width)])
        #: Whether each knob has values that are apart from each other.
        self.apart = np.array([isinstance(knob, Choice) or knob.off is not None for knob in self.knobs.values()])

    def __repr__(self) -> str:
        return f"Space({', '.join(f'{name}={knob!r}' for name, knob in self.knobs.items())})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Space) and self.describe() == other.describe()

    __hash__ = None  # type: ignore[assignment]

    @property
    def width(self) -> int:
        """Number of columns of an encoded setting."""
        return len(self.groups)

    def check(self, knobs: Mapping[str, Any], what: str = "the setting") -> Knobs:
        """Return a setting with exactly the knobs of this space, in their order.

        Raises
        ------
        ValueError
            A knob is missing, unknown, or out of its range.
        """
        missing = [name for name in self.knobs if name not in knobs]
        unknown = [name for name in knobs if name not in self.knobs]
        if missing or unknown:
            parts = [f"lacks {', '.join(map(repr, missing))}"] if missing else []
            parts += [f"has {', '.join(map(repr, unknown))}, which the space has not"] if unknown else []
            raise ValueError(f"{what} {' and '.join(parts)}")
        for name, knob in self.knobs.items():
            wrong = knob.error(knobs[name])
            if wrong is not None:
                raise ValueError(f"{what} has a bad {name!r}: {wrong}")
        return {
            name: int(knobs[name]) if isinstance(knob, Integer) else knobs[name] for name, knob in self.knobs.items()
        }

    def encode(self, knobs: Mapping[str, Any]) -> Array:
        """Return the coordinates of a setting: shape (width,), float64, each from 0 to 1."""
        return np.array([at for name, knob in self.knobs.items() for at in knob.encode(knobs[name])])

    def decode(self, at: Array) -> Knobs:
        """Return the setting nearest to the coordinates, of shape (width,)."""
        knobs, begin = {}, 0
        for name, knob in self.knobs.items():
            knobs[name] = knob.decode([float(each) for each in at[begin : begin + knob.width]])
            begin += knob.width
        return knobs

    def encode_shares(self, shares: Array) -> Array:
        """Return encoded settings for numbers between 0 and 1, one per knob: shape (n, knobs) to (n, width)."""
        return np.concatenate([knob.encode_shares(shares[:, g]) for g, knob in enumerate(self.knobs.values())], axis=1)

    def snap_coordinates(self, at: Array) -> Array:
        """Return the encodings of the nearest settings: shape (n, width) to the same."""
        return np.concatenate(
            [knob.snap_coordinates(at[:, self.groups == g]) for g, knob in enumerate(self.knobs.values())], axis=1
        )

    def describe(self) -> dict[str, dict[str, Any]]:
        """Describe the space in JSON's types, for `Space.from_description`."""
        return {
            name: {"kind": type(knob).__name__, **{each: _listify_tuple(getattr(knob, each)) for each in vars(knob)}}
            for name, knob in self.knobs.items()
        }

    @classmethod
    def from_description(cls, described: Mapping[str, Mapping[str, Any]]) -> Space:
        """Create the space from the result of `describe`.

        Raises
        ------
        ValueError
            The description is invalid.
        """
        knobs: dict[str, Any] = {}
        for name, fields in described.items():
            try:
                rest = dict(fields)
                knobs[name] = KINDS[rest.pop("kind")](**rest)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"knob {name!r} is not described as a Real, an Integer or a Choice: {error}"
                ) from error
        return cls(**knobs)


OFF_SHARE = 0.15  # share of spread points at which a knob that has an off value is off


def _listify_tuple(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
