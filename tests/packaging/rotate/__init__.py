"""An operation that the engine lacks, to be added to a copy of its sources as CONTRIBUTING.md says."""

from __future__ import annotations

import shutil
from pathlib import Path

HERE = Path(__file__).parent
METHOD = """
    def rotate(self, tensor, output, name, bint blocking=False):
        expect_open(self.state)
        return self.start(rotate_op(tensor, output), name, blocking, output)

"""
BROUGHT = """

cdef Op* rotate_op(object tensor, object output) except NULL:
    cdef View source, target
    cdef object keeper = view_of(tensor, &source)
    cdef object kept = same_shape(tensor, &source, output, &target, source.dims[0])
    return tensor_op(KIND_ROTATE, &source, &target, (tensor, output, keeper, kept))
"""
DECLARED = "cdef Op* rotate_op(object tensor, object output) except NULL\n"
# By file: what is put behind which text. The two files beside this one come to engine_ext/operations.
EDITS = {
    "engine_ext/shared/names.h": [('ROW(KIND_REDUCESCATTER, "reducescatter")', ' ROW(KIND_ROTATE, "rotate")')],
    "engine_ext/shared/layout.pxd": [(" KIND_REDUCESCATTER,", " KIND_ROTATE,")],
    "engine_ext/operations/kinds.pyx": [
        ("cimport allgather_row\n", "from engine_ext.operations.rotate cimport rotate_row\n"),
        (" KIND_REDUCESCATTER, ", "KIND_ROTATE, "),
        ("reducescatter_row())\n", "fill_in(KIND_ROTATE, rotate_row())\n"),
    ],
    "engine_ext/meson.build": [("  'operations/operation',\n", "  'operations/rotate',\n")],
    "engine_ext/bindings/collectives.pyx": [
        (" KIND_BROADCAST, KIND_REDUCESCATTER,", " KIND_ROTATE,"),
        ("(e.segment.rank < rows % e.segment.size)\n", BROUGHT),
    ],
    "engine_ext/bindings/collectives.pxd": [
        ("cdef Op* barrier_op(State* e, object name, bint blocking) except NULL\n", DECLARED),
    ],
    "engine_ext/core.pyx": [
        (" size_barrier_op,", " rotate_op,"),
        ("allreduce_op(self.state, tensor, output, op, prescale, postscale, wire), name, blocking, output)\n", METHOD),
    ],
    "engine/metrics/names.py": [('"reducescatter"', ', "rotate"')],
}


def add_operation(tree: Path) -> None:
    for name in ("rotate.pyx", "rotate.pxd"):
        shutil.copy(HERE / name, tree / "engine_ext/operations" / name)
    for name, edits in EDITS.items():
        text = (tree / name).read_text()
        for place, added in edits:
            assert text.count(place) == 1, f"{name} has {text.count(place)} times {place!r}"
            text = text.replace(place, place + added)
        (tree / name).write_text(text)
