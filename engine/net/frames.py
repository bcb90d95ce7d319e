"""Frames: the conversion of a peer's bytes to messages, with limits that are checked before parsing.

A frame is its length in four bytes, followed by so many bytes of content. The length is checked as soon as it has
arrived: no part of a frame that is too long is stored or parsed. A peer that has not authenticated itself may send
frames of at most `UNPROVEN` bytes.
"""

from __future__ import annotations

import struct
from typing import Any

from ..text.bounded_reader import ReadError, parse_json

UNPROVEN = 4 << 10
"""Largest frame, in bytes, from a peer that has not yet proven that it knows the job's secret."""
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""Errors that reading a field of a peer's message may raise, because the field is missing or malformed."""
_LENGTH = struct.Struct(">I")
HEADER = _LENGTH.size


class FrameError(ValueError):
    """The peer's bytes are not a frame, or not an allowed one."""


def wrap(content: bytes) -> bytes:
    """Return a frame with this content."""
    return _LENGTH.pack(len(content)) + content


def missing_bytes(buffer: bytes | bytearray, limit: int, least: int = 1) -> int:
    """Return the number of bytes that the first frame in a buffer still lacks, as far as known; 0: it is complete.

    A frame shorter than `least` or longer than `limit` bytes is a FrameError.
    """
    if len(buffer) < HEADER:
        return HEADER - len(buffer)
    (length,) = _LENGTH.unpack_from(buffer)
    if not least <= length <= limit:
        raise FrameError(f"a frame of {length} bytes; at least {least} and at most {limit} are expected")
    return max(0, HEADER + int(length) - len(buffer))


def cut_frame(buffer: bytearray, limit: int, least: int = 1) -> bytes | None:
    """Cut the first frame off a buffer, and return its content; None as long as it is incomplete.

    `least` and `limit` bound the content, in bytes; errors are those of `missing_bytes`.
    """
    if missing_bytes(buffer, limit, least):
        return None
    (length,) = _LENGTH.unpack_from(buffer)
    content = bytes(buffer[HEADER : HEADER + length])
    del buffer[: HEADER + length]
    return content


def parse(text: bytes) -> Any:
    """Parse JSON that came from a peer.

    It raises a FrameError if the text is not JSON or exceeds a limit of `parse_json`: nested too deeply, or with a
    number that is not finite.
    """
    try:
        return parse_json(text, halves=True)
    except ReadError as error:
        raise FrameError(str(error)) from None


def parse_object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object that came from a peer; FrameError like `parse`, and for JSON that is not an object."""
    found = parse(text)
    if not isinstance(found, dict):
        raise FrameError("its JSON is no object")
    return found
