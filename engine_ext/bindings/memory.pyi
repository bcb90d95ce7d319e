"""Types of the memory helpers."""

from typing import Any

def checksum(tensor: Any) -> int:
    """64-bit checksum of the bytes of a contiguous tensor."""
