"""Output of texts from logs to a terminal, without letting them control it."""

from __future__ import annotations

import sys
from typing import TextIO


def replace_unprintable(text: object) -> str:
    """Replace characters that a terminal would interpret."""
    return "".join(each if each.isprintable() else "?" for each in str(text))


def print_text(text: object, file: TextIO | None = None) -> None:
    """Print lines that may quote files."""
    print("\n".join(map(replace_unprintable, str(text).split("\n"))), file=sys.stdout if file is None else file)
