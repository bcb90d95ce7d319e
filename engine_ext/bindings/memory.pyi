"""Types of the memory helpers."""

from typing import Any

def expect_memory(tensor: Any) -> None:
    """Raise UnsupportedTensorError unless a tensor lends memory, contiguous or not."""

def checksum(tensor: Any) -> int:
    """64-bit checksum of the bytes of a contiguous tensor."""
