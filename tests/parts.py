"""Parts of a command that are run one after the other, all of them or those that are named."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence


def run_parts(
    parts: Mapping[str, Callable[[], str]],
    chosen: Sequence[str],
    parser: argparse.ArgumentParser,
    absent: type[Exception],
) -> int:
    """Run parts and print what each says.

    Parameters
    ----------
    parts : mapping of str to callable
        Each returns what it has done, and raises an AssertionError that says what is wrong.
    chosen : sequence of str
        Names of parts; empty: all of them.
    parser : argparse.ArgumentParser
        Tells the user of a name that is not there.
    absent : type of Exception
        What a part raises if it cannot run here; its text says why.

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
