"""What the launcher raises."""

from __future__ import annotations


class LaunchError(Exception):
    """A job that cannot start. The text says what, where and how to mend it, in one line; the exit code is 2."""
