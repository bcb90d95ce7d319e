"""Files in YAML, read within limits: aliases and deep nesting make a short one take hours and all memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from .. import bounded_reader

LARGEST = 1 << 16  # bytes of a file
DEEPEST = 16  # levels of sections and lists


class YAMLFileError(Exception):
    """A text that is no YAML, or beyond a limit.

    Attributes
    ----------
    line : int or None
        The line where it is wrong, from 1, if that is known.
    """

    def __init__(self, text: str, line: int | None) -> None:
        super().__init__(text)
        self.line = line


def compose(text: str) -> Any:
    """Read a text as nodes, which know their lines; None: it is empty. Errors as of `load`."""
    return _read(text, lambda loader: loader.get_single_node())


def load(text: str) -> Any:
    """Read a text as Python's values, in which numbers are texts.

    Raises
    ------
    ModuleNotFoundError
        PyYAML is not installed.
    YAMLFileError
        It is no YAML, is nested too deeply, or has an alias.
    """
    return _read(text, lambda loader: loader.get_single_data())


def _read(text: str, read: Callable[[Any], Any]) -> Any:
    import yaml

    try:
        return read(_loader()(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        why = " ".join(str(getattr(error, "problem", None) or error).split())
        raise YAMLFileError(why, None if mark is None else mark.line + 1) from error
    # What PyYAML raises for a value that is not of the type that its tag or its look promises.
    except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
        raise YAMLFileError(f"a value is not what it looks like: {bounded_reader.shorten(str(error))}", None) from error


@cache
def _loader() -> Any:
    """PyYAML's loader of plain values, with the limits."""
    import yaml

    class Limited(yaml.SafeLoader):  # type: ignore[misc]
        level = 0

        def fetch_flow_collection_start(self, TokenClass: Any) -> None:
            if self.flow_level >= DEEPEST:  # the scanner reads ahead, in a time that grows with the square of them
                raise yaml.scanner.ScannerError(None, None, f"more than {DEEPEST} levels", self.get_mark())
            super().fetch_flow_collection_start(TokenClass)

        def compose_node(self, parent: Any, index: Any) -> Any:
            at = self.peek_event().start_mark
            if self.check_event(yaml.AliasEvent):
                raise yaml.composer.ComposerError(None, None, "it has an alias (*name): write the value out", at)
            if self.level >= DEEPEST:
                raise yaml.composer.ComposerError(None, None, f"more than {DEEPEST} levels", at)
            self.level += 1
            try:
                return super().compose_node(parent, index)
            finally:
                self.level -= 1

    # YAML reads 010 as 8, 1:30 as 90 and 1_000 as 1000: a number stays the text that it is, and its form reads it.
    for kind in ("int", "float"):
        Limited.add_constructor(f"tag:yaml.org,2002:{kind}", lambda loader, node: str(loader.construct_scalar(node)))
    return Limited
