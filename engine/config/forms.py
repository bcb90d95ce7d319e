"""Forms: parsers that convert a text or a caller's value, or refuse it.

A form is called with one value. It raises a ValueError that says what it expects, such as `a number from 0 to 10000`.
So ranges and words are written once: for settings, for the launcher's other options, and for the tuner.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from ..host import machine
from ..host.patience import LONGEST
from ..text import readable

Form = Callable[[Any], Any]
LARGEST = 1 << 60  # largest number of bytes, and of numbers that are only compared
MOST = 1 << 20  # largest number of ranks, slots and other items that take memory each
MOST_PORTS = (1 << 16) - 1
LONGEST_NUMBER = 40  # characters of a number in text
_SUFFIXES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_FUNCTION = re.compile(r"[A-Za-z_][\w.]{0,255}:[A-Za-z_]\w{0,255}", re.ASCII)
_LEVELS = {"trace": "DEBUG", "fatal": "CRITICAL", "warn": "WARNING"}


def _number_text(value: Any) -> str:
    """Return a value as text to be parsed as a number; empty if it is not written as an ordinary number.

    Python itself would also accept `1_000`, digits of other scripts and bools. An int with thousands of digits would
    raise an error of Python's own.
    """
    if isinstance(value, bool) or (isinstance(value, int) and value.bit_length() > 8 * LONGEST_NUMBER):
        return ""
    text = str(value)
    return text.strip() if len(text) <= LONGEST_NUMBER and text.isascii() and "_" not in text else ""


@dataclass(frozen=True)
class Number:
    """Numbers in [low, high]."""

    low: float
    high: float
    noun: str = "a number"  # noun for errors
    zero: str = ""  # meaning of 0, for errors, if 0 is not a quantity

    def __call__(self, value: Any) -> float:
        try:
            number = float(_number_text(value))
        except ValueError:
            raise ValueError(str(self)) from None
        if not self.low <= number <= self.high:
            raise ValueError(str(self))
        return number

    def __str__(self) -> str:
        return f"{self.noun} from {self.low:g} to {self.high:g}" + (f"; 0 is {self.zero}" if self.zero else "")


def make_duration_form(low: float = 0.0, zero: str = "") -> Number:
    """Return a form of durations from `low` to `LONGEST`; `zero` is the meaning of 0, if it is not a duration."""
    return Number(low, LONGEST, "a number of seconds", zero)


@dataclass(frozen=True)
class Whole:
    """Whole numbers in [low, high]."""

    low: int
    high: int = MOST

    def __call__(self, value: Any) -> int:
        text = _number_text(value)
        if not text.isdigit() or not self.low <= int(text) <= self.high:
            raise ValueError(str(self))
        return int(text)

    def __str__(self) -> str:
        return f"a whole number from {self.low} to {self.high}"


def whole_number(name: str, value: Any, low: int) -> int:
    """Check a count that a caller has passed: an int, or another number with an integral value.

    A ValueError says that it is not a number, not integral, or less than `low`.
    """
    try:
        number = int(value)
        is_whole = bool(number == value)
    except (TypeError, ValueError, OverflowError):
        number, is_whole = 0, False
    if not is_whole:
        raise ValueError(f"{name} is a whole number, not {value!r}")
    if number < low:
        raise ValueError(f"{name} is {low} or more, not {value}")
    return number


@dataclass(frozen=True)
class Bytes:
    """Whole numbers of bytes in [low, high]; a text may end in k, M or G (powers of 1024), with an optional i and B."""

    low: int = 0
    high: int = LARGEST
    example: str = "67108864 or 64M"

    def __call__(self, value: Any) -> int:
        text = _number_text(value).lower()
        for ending in ("b", "i"):
            text = text.removesuffix(ending)
        suffix = text[-1:] if text[-1:] in ("k", "m", "g") else ""
        digits = text.removesuffix(suffix).strip()
        if not digits.isdigit():
            raise ValueError(str(self))
        if not self.low <= int(digits) * _SUFFIXES[suffix] <= self.high:
            raise ValueError(str(self))
        return int(digits) * _SUFFIXES[suffix]

    def __str__(self) -> str:
        high = "2^60" if self.high == LARGEST else self.high
        return f"a number of bytes from {self.low} to {high}, such as {self.example}"


FASTEST = 1e15  # bits a second of a link
SLOWEST = 3600.0  # seconds on the way


def bit_rate(value: Any) -> float:
    """Parse a bit rate in powers of ten, such as `25G`, `800 Mbit/s` or `1.5e9 bit/s`, to bits a second."""
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?) *(?:([KkMGT])(b|bps)?|bps|([KkMGT])?bits?(/s)?)", _number_text(value))
    powers = {None: 0, "K": 3, "k": 3, "M": 6, "G": 9, "T": 12}
    try:
        rate = 0.0 if found is None else float(found[1]) * 10.0 ** powers[found[2] or found[4]]
        if not 1 <= rate <= FASTEST:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"a number of bits a second from 1 to {FASTEST:g} with its unit, such as 25G, 800M or 100 Gbit/s (of bytes "
            "a second, eight times)"
        ) from None
    return rate


def short_time(value: Any) -> float:
    """Parse a time with its unit, such as `30us`, to seconds."""
    text = "" if isinstance(value, bool) else str(value).strip()[: LONGEST_NUMBER + 1]
    found = re.fullmatch(r"([0-9.]{1,30}) *(ns|us|\u00b5s|\u03bcs|ms|s)", "0s" if text == "0" else text)
    factors = {"ns": 1e-9, "ms": 1e-3, "s": 1.0}
    try:
        if found is None:
            raise ValueError
        number = float(found[1]) * factors.get(found[2], 1e-6)
        if number > SLOWEST:
            raise ValueError
        return number
    except ValueError:
        raise ValueError(
            f"a time of at most {SLOWEST:g} s with its unit (ns, us, ms or s), such as 30us or 0.2ms, or 0"
        ) from None


@dataclass(frozen=True)
class Words:
    """One of several words, in upper or lower case."""

    words: tuple[str, ...]

    def __init__(self, *words: str) -> None:
        object.__setattr__(self, "words", words)

    def __call__(self, value: Any) -> str:
        text = str(value).strip().lower()
        if text not in self.words:
            raise ValueError(str(self))
        return text

    def __str__(self) -> str:
        return "one of " + ", ".join(self.words)


@dataclass(frozen=True, init=False)
class WordOrFunction(Words):
    """One of several words, or the name of a function as module:function."""

    def __call__(self, value: Any) -> str:
        text = str(value).strip()
        return text if _FUNCTION.fullmatch(text) else super().__call__(value)

    def __str__(self) -> str:
        return f"{super().__str__()}, or module:function"


def parse_level(value: Any) -> str:
    """Parse the name of a log level to that of the `logging` module."""
    text = str(value).strip().lower()
    text = _LEVELS.get(text, text.upper())
    if text not in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
        raise ValueError("one of trace, debug, info, warning, error, fatal")
    return text


def parse_truth(value: Any) -> bool:
    """Parse a switch, such as `1`, `yes` or `off`."""
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    text = str(value).strip().lower()
    if text not in words:
        raise ValueError("1 or 0")
    return words[text]


def parse_text(value: Any) -> str:
    """Check that a value is a text that is not blank, and strip it."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a text that is not blank")
    return value.strip()


def parse_url(value: Any) -> str:
    """Parse the address of an HTTP server, to which paths are appended; credentials are refused, as it is shown."""
    text = parse_text(value)
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        valid = valid and "@" not in parts.netloc and not set("?#") & set(text)
    except ValueError:  # such as a port that is no number
        valid = False
    if not valid or not text.isascii() or any(each.isspace() or not each.isprintable() for each in text):
        raise ValueError(
            "the address of an HTTP server, such as http://127.0.0.1:4318, without a user's name, '?' or '#'"
        )
    return text


def parse_path(value: Any) -> Path:
    """Parse a path and make it absolute."""
    if not isinstance(value, str | os.PathLike) or not str(value).strip() or "\0" in str(value):
        raise ValueError("a path")
    try:
        return machine.absolute_path(value)
    except FileNotFoundError as error:
        raise ValueError(f"an absolute path, for {error.strerror}") from None


def parse_cache(value: Any) -> Path | Literal[False] | None:
    """Parse the directory of a cache; None: the engine decides; False: no cache."""
    text = "auto" if value is None else str(value).strip().lower()
    if text in ("auto", "none"):
        return None if text == "auto" else False
    try:
        return None if parse_truth(text) else False
    except ValueError:
        pass
    try:
        return parse_path(value)
    except ValueError as error:
        raise ValueError(f"auto, off, or {error}") from None


def make_optional(form: Form, word: str) -> Form:
    """Extend a form so that None and `word` give None, which lets the engine decide."""

    def parse(value: Any) -> Any:
        if value is None or str(value).strip().lower() == word:
            return None
        try:
            return form(value)
        except ValueError as error:
            raise ValueError(f"{word}, or {error}") from None

    return parse


def make_argument_type(form: Form) -> Callable[[str], Any]:
    """Convert a form to the `type` of an argparse option, with the form's own error text."""

    def read_argument(text: str) -> Any:
        try:
            return form(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{readable.quote_value(text)} is not {error}") from None

    return read_argument
