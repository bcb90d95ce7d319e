"""Pages of counters as a rank would write them, for tests of their readers."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping

from engine.metrics import page
from engine.metrics.names import NAMES

FIELDS_AT = 3072


def names_text(names: Mapping[str, tuple[str, ...]]) -> str:
    """Lines that define names."""
    return "".join(f"{name} = {' '.join(words)}\n" for name, words in names.items())


def words_of(text: str) -> list[int]:
    """Text as words of a page."""
    return list(struct.unpack(f"={page.HOST_WORDS}Q", text.encode().ljust(8 * page.HOST_WORDS, b"\0")))


def groups_of(*texts: str) -> list[int]:
    """Names of groups as words of a page."""
    width = 8 * page.GROUP_WORDS
    return list(
        struct.unpack(
            f"={page.GROUP_WORDS * len(texts)}Q", b"".join(each.encode().ljust(width, b"\0") for each in texts)
        )
    )


def content(version: int = page.VERSION, **fields: int | list[int]) -> bytes:
    """Bytes of a page; fields that are not named are 0."""
    table, words = "", []
    for name, count in page.EXPECTED.items():
        given = fields.pop(name, 0)
        values = given if isinstance(given, list) else [given]
        table += f"{name} {FIELDS_AT + 8 * len(words)} {count}\n"
        words += values + [0] * (count - len(values))
    assert not fields, fields
    table += names_text(NAMES)
    head = page.HEADER.pack(page.MAGIC, version, page.BYTES, len(table)).ljust(page.TABLE, b"\0")
    body = (head + table.encode()).ljust(FIELDS_AT, b"\0") + struct.pack(f"{len(words)}Q", *words)
    return body.ljust(page.BYTES, b"\0")


def fill(descriptor: int, **fields: int | list[int]) -> None:
    """Write a page."""
    os.pwrite(descriptor, content(**fields), 0)  # type: ignore[arg-type]


def snapshot(**fields: int | list[int]) -> page.Snapshot:
    """Result of `page.read` for such a page."""
    descriptor = page.make()
    try:
        fill(descriptor, **fields)
        found = page.read(descriptor)
        assert found is not None
        return found
    finally:
        os.close(descriptor)
