"""Types of the memory helpers."""

from collections.abc import Callable
from typing import Any

def expect_memory(tensor: Any) -> None:
    """Raise UnsupportedTensorError unless a tensor lends memory, contiguous or not."""

def lend_directly(kind: type, is_negated: Callable[[Any], bool]) -> None:
    """Have tensors of a type, but not of its subclasses, reduced where they lie without a look at anything but their
    memory, unless `is_negated` says of one that its elements are the negatives of what lies there.
    """

def checksum(tensor: Any) -> int:
    """64-bit checksum of the bytes of a contiguous tensor."""
