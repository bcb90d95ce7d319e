"""Warnings about what a later version will remove; docs/reference/upgrades.md has the policy."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any


def warn_deprecated(subject: str, since: str, removal: str, instead: str, stacklevel: int = 2) -> None:
    """Warn a user that something is deprecated.

    Parameters
    ----------
    subject : str
        The deprecated thing, as a user knows it.
    since : str
        First version that warns.
    removal : str
        Version from which on it is gone: two minor versions after `since`, or later.
    instead : str
        A sentence: what to do instead.
    stacklevel : int
        The frame that the warning names: 1 is that of the caller, 2 that of the caller's caller.
    """
    text = f"{subject}: deprecated since version {since}, and gone from version {removal} on. {instead}"
    warnings.warn(text, FutureWarning, stacklevel=stacklevel + 1)


def warn_former_file(former: str, stacklevel: int = 2) -> None:
    """Warn that a file is loaded in which a revision before 0.1 has pickled a name that has changed since."""
    warn_deprecated(
        f"a file from before version 0.1, which names {former}", "0.1", "0.3", "Save what it holds again.",
        stacklevel + 1,
    )  # fmt: skip


def find_former_name(module: str, name: str, present: Mapping[str, Any]) -> Any:
    """Return what a former name of a module stands for, for files that have pickled it.

    `present` has the values by their former names. The module's `__getattr__` calls this. Raises AttributeError if the
    module never had the name.
    """
    if name not in present:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warn_former_file(f"{module}.{name}", stacklevel=3)
    return present[name]
