"""Reader of YAML files with limits, since aliases and deep nesting can make a short file take hours and all memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ...text import bounded_reader

LARGEST = 1 << 16  # largest size of a file in bytes
DEEPEST = 16  # most levels of sections and lists


class YAMLFileError(Exception):
    """A text is no YAML, or exceeds a limit."""

    def __init__(self, text: str, line: int | None) -> None:
        super().__init__(text)
        self.line = line  # line of the error, from 1; None if it is not known


def parse_nodes(text: str) -> Any:
    """Parse a text into nodes, which have line numbers; None if it is empty. Raises as `load` does."""
    return _read(text, lambda loader: loader.get_single_node())


def load(text: str) -> Any:
    """Parse a text into Python values, in which numbers stay texts.

    A `ModuleNotFoundError` is raised if PyYAML is not installed, and a `YAMLFileError` if the text is no YAML, is
    nested too deeply, or has an alias.
    """
    return _read(text, lambda loader: loader.get_single_data())


def _read(text: str, read: Callable[[Any], Any]) -> Any:
    import yaml

    try:
        return read(_make_loader()(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        why = " ".join(str(getattr(error, "problem", None) or error).split())
        raise YAMLFileError(why, None if mark is None else mark.line + 1) from error
    # PyYAML raises these for a value that is not of the type that its tag or its form promises.
    except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
        raise YAMLFileError(
            f"a value is not what it looks like: {bounded_reader.shorten_text(str(error))}", None
        ) from error


@cache
def _make_loader() -> Any:
    """Make a PyYAML loader of plain values that enforces the limits."""
    import yaml

    class Limited(yaml.SafeLoader):  # type: ignore[misc]
        level = 0

        def fetch_flow_collection_start(self, TokenClass: Any) -> None:
            if self.flow_level >= DEEPEST:  # the scanner's look-ahead takes time quadratic in them
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

    # YAML reads 010 as 8, 1:30 as 90 and 1_000 as 1000. So numbers stay texts, which the options' own forms parse.
    for kind in ("int", "float"):
        Limited.add_constructor(f"tag:yaml.org,2002:{kind}", lambda loader, node: str(loader.construct_scalar(node)))
    return Limited
