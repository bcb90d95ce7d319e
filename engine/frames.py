"""Frames: the one place where the bytes of a peer become messages, with the limits that hold before they are parsed.

A frame is its length, as four bytes, and so many bytes. The length is judged as soon as it is there: nothing is kept or
parsed of a frame that is too long. A peer that has proven nothing may send frames of `UNPROVEN` bytes.
"""

from __future__ import annotations

import struct
from typing import Any

from .bounded_reader import ReadError, parse_json

UNPROVEN = 4 << 10
"""Most bytes of a frame from a peer that has not proven that it knows the job's secret."""
_LENGTH = struct.Struct(">I")
HEADER = _LENGTH.size


class FrameError(ValueError):
    """The peer's bytes are no frame, or a frame that is not allowed."""


def wrap(content: bytes) -> bytes:
    """Return a frame with this content."""
    return _LENGTH.pack(len(content)) + content


def missing(buffer: bytes | bytearray, limit: int, least: int = 1) -> int:
    """Return how many bytes the first frame in a buffer still lacks, as far as is known; 0: it is whole.

    Raises
    ------
    FrameError
        The frame is shorter than `least` or longer than `limit`.
    """
    if len(buffer) < HEADER:
        return HEADER - len(buffer)
    (length,) = _LENGTH.unpack_from(buffer)
    if not least <= length <= limit:
        raise FrameError(f"a frame of {length} bytes; at least {least} and at most {limit} are expected")
    return max(0, HEADER + int(length) - len(buffer))


def cut(buffer: bytearray, limit: int, least: int = 1) -> bytes | None:
    """Cut the first frame off a buffer.

    Parameters
    ----------
    buffer : bytearray
        Received bytes; those of the frame are removed.
    limit, least : int
        Most and fewest bytes of the frame.

    Returns
    -------
    bytes or None
        The content; None as long as it is incomplete.

    Raises
    ------
    FrameError
        As of `missing`.
    """
    if missing(buffer, limit, least):
        return None
    (length,) = _LENGTH.unpack_from(buffer)
    content = bytes(buffer[HEADER : HEADER + length])
    del buffer[: HEADER + length]
    return content


def parse(text: bytes) -> Any:
    """Parse JSON that came from a peer.

    Raises
    ------
    FrameError
        It is no JSON, or beyond the limits of `parse_json`: nested too deeply, or with a number that is not finite.
    """
    try:
        return parse_json(text, halves=True)
    except ReadError as error:
        raise FrameError(str(error)) from None


def parse_object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object that came from a peer.

    Raises
    ------
    FrameError
        As of `parse`; or it is no object.
    """
    found = parse(text)
    if not isinstance(found, dict):
        raise FrameError("its JSON is no object")
    return found
