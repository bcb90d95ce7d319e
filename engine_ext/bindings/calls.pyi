"""Types of the native call: the table of functions that compiled code of frameworks submits through (calls.h)."""

from typing import Any

TABLE: Any
"""A capsule named `engine_calls` that holds the table."""

def address() -> int:
    """Where the table lies in this process, for `ctypes`."""
