"""Constants that a copy of the engine is made to show, one from each kind of file that a module is made of."""

from __future__ import annotations

from pathlib import Path


def write_marks(tree: Path, pyx: int, pxd: int, header: int) -> None:
    """Give the module three constants, one from each kind of file that it is made of."""
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
