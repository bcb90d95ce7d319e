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
    """Run parts and print what each reports; return the exit code, 1 if a part has failed, else 0.

    A part returns what it did, or raises an AssertionError that says what is wrong, or `absent` that says why it cannot
    run here. Empty `chosen` means all parts; `parser` reports an unknown name to the user.
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
