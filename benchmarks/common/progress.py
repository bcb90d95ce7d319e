"""Progress bar for measurements that take minutes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Advance = Callable[[str], None]
"""Callable for the end of a step, with the name of the next one."""


@contextlib.contextmanager
def show_progress(console: Console, title: str, steps: int) -> Iterator[Advance]:
    """Show how many of `steps` are done. It refreshes only between steps, so as not to disturb a measurement."""
    columns = (
        TextColumn("{task.description:<44}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task(title, total=steps)
        progress.refresh()

        def advance_bar(now: str) -> None:
            progress.update(task, advance=1, description=f"{title}: {now}")
            if console.is_terminal:
                progress.refresh()

        yield advance_bar
        progress.refresh()
