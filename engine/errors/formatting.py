"""Texts of exceptions, also of those whose `__str__`, which is the program's code, raises itself."""

from __future__ import annotations

LONGEST_TEXT = 1000  # characters of an exception's text that are passed on


def format_exception(error: BaseException) -> str:
    """Format an exception in one line, with the first line of its text, such as `ValueError: bad batch`."""
    text = exception_text(error).strip().splitlines()
    return type(error).__name__ + (f": {text[0][:LONGEST_TEXT]}" if text else "")


def format_whole_exception(error: BaseException) -> str:
    """Format an exception with all lines of its text."""
    return f"{type(error).__name__}: {exception_text(error)}"


def exception_text(error: BaseException) -> str:
    """Return the text of an exception, or a note if `__str__` raises."""
    try:
        return str(error)
    except Exception as another:
        return f"(its text cannot be made: {type(another).__name__})"
