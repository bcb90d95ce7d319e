"""Run the parts of a command one after the other, either all or those that are named."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence


def run_parts(
    parts: Mapping[str, Callable[[], str]],
    chosen: Sequence[str],
    parser: argparse.ArgumentParser,
    absent: type[Exception],
) -> int:
    """Run parts and print what each reports.

    Parameters
    ----------
    parts : mapping of str to callable
        Functions that return what they did, or raise an AssertionError that says what is wrong.
    chosen : sequence of str
        Names of parts; empty means all of them.
    parser : argparse.ArgumentParser
        Parser that reports an unknown name to the user.
    absent : type of Exception
        Exception that a part raises if it cannot run here; its text says why.

    Returns
    -------
    int
        Exit code: 1 if a part has failed, else 0.
    """
    if unknown := set(chosen) - set(parts):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are: {', '.join(parts)}")
    failed = False
    for name in chosen or parts:
        try:
            print(f"{name}: {parts[name]()}", flush=True)
        except absent as error:
            print(f"{name}: left out, {error}", flush=True)
        except AssertionError as error:
            failed = True
            print(f"{name}: FAILED: {error}", flush=True)
    return int(failed)
