"""Constants that a copy of the engine exposes, one from each kind of source file of a module."""

from __future__ import annotations

import re
from pathlib import Path

Marks = tuple[int, int, int]


def read_marks(tree: Path) -> Marks:
    """Values of the three constants in the sources: the .pyx, the .pxd and the header."""
    places = {
        "engine_ext/core.pyx": r"^mark_pyx, .* = (\d+),",
        "engine_ext/marks.pxd": r"MARK_PXD = (\d+)",
        "engine_ext/marks.h": r"MARK_H (\d+)",
    }
    pyx, pxd, header = (re.findall(wanted, (tree / name).read_text(), re.MULTILINE) for name, wanted in places.items())
    return int(pyx[0]), int(pxd[0]), int(header[0])


def write_marks(tree: Path, marks: Marks) -> None:
    """Write the three constants, one into each kind of source file."""
    pyx, pxd, header = marks
    files = {
        "engine_ext/marks.h": f"#define MARK_H {header}\n",
        "engine_ext/marks.pxd": f'cdef extern from "marks.h":\n    int MARK_H\ncdef enum:\n    MARK_PXD = {pxd}\n',
    }
    core = tree / "engine_ext/core.pyx"
    source = core.read_text().partition("# marks\n")[0]
    added = f"from engine_ext.marks cimport MARK_H, MARK_PXD\nmark_pyx, mark_pxd, mark_h = {pyx}, MARK_PXD, MARK_H\n"
    files["engine_ext/core.pyx"] = f"{source}# marks\n{added}"
    for name, text in files.items():
        path = tree / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
