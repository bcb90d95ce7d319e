"""Tables for the terminal and for Markdown pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

MISSING = "-"


@dataclass
class Table:
    """Table of text cells. The first column is aligned left, the others right unless they are named in `left`."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    note: str = ""
    left: Sequence[str] = ()

    def print_to(self, console: Console) -> None:
        """Print the table."""
        table = RichTable(title=self.title, title_justify="left", box=box.SIMPLE_HEAD)
        for i, name in enumerate(self.columns):
            table.add_column(Text(name), justify="left" if i == 0 or name in self.left else "right")
        for row in self.rows:
            table.add_row(*(Text(cell, style={"pass": "green", "miss": "red"}.get(cell, "")) for cell in row))
        console.print(table)
        if self.note:
            console.print(Text(self.note, style="dim"))
        console.print()

    def to_markdown(self) -> str:
        """Return the table as Markdown."""
        marks = ["---" if i == 0 or name in self.left else "---:" for i, name in enumerate(self.columns)]
        lines = [f"**{self.title}**", "", *(_format_row(cells) for cells in (self.columns, marks, *self.rows))]
        if self.note:
            lines += ["", self.note]
        return "\n".join(lines) + "\n"


def _format_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


# Imported at use: a rank may run another build of the engine, which may lack this module.


def format_duration(seconds: float | None) -> str:
    """Format a duration, which is None if it was not measured.

    >>> format_duration(1.234e-6), format_duration(None)
    ('1.23 us', '-')
    """
    from engine.text import readable

    return MISSING if seconds is None else readable.format_seconds(seconds)


def format_size(nbytes: int) -> str:
    """Format bytes in binary units.

    >>> format_size(4), format_size(104857600)
    ('4 B', '100 MiB')
    """
    from engine.text import readable

    return readable.format_size(nbytes)


def format_digits(value: float) -> str:
    """Format a number with three significant digits, without an exponent.

    >>> format_digits(1234.5), format_digits(12.345), format_digits(0.01234)
    ('1234', '12.3', '0.0123')
    """
    magnitude = abs(value)
    if magnitude >= 100:
        return f"{value:.0f}"
    if magnitude >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if magnitude >= 1 or value == 0 else f"{value:.3g}"
