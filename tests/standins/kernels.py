"""The shipped kernels for the stand-in of libcuda: translated, with a description of their reads and writes.

`build` makes a library which registers all of them in the process that loads it.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from . import COMPILER, LIBRARY, ROOT, ptx

PTX = ROOT / "engine_ext/gpu/kernels.ptx"
SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "bytes": 1, "bool": 1} | {
    f"{sign}int{8 * size}": size for sign in ("", "u") for size in (1, 2, 4, 8)
}
PIECE = 2048  # bytes of the slab described by one 4-byte number of a table (kernels.cu)
DISTANCE = 0x100000000000  # from a device address to the executor's mapping of it (cuda/memory.c)

HEAD = """\
#include "tests/standins/cuda/stand.h"
#include "engine_ext/gpu/device.h"

typedef void ptx_function(void **, const unsigned *, const unsigned *, const unsigned *, const unsigned *);
extern long ptx_distance;
extern char ptx_error[];
int ptx_launch(ptx_function *, void **, const unsigned *, const unsigned *);

static void run(ptx_function *kernel, const stand_launch *l, void **p) {
  ptx_distance = %(distance)d;
  if (ptx_launch(kernel, p, l->grid, l->block)) stand_found("%%s", ptx_error);
}

/* A plan: its table with the numbers of pieces; the tensors on one side, their places in the slab on the other. */
static int plan(void **p, int packs, unsigned tensor, unsigned wire, stand_access *a, int room) {
  uint64_t table = *(uint64_t *)p[0], rows = *(uint64_t *)p[1], end = *(uint64_t *)p[2], slab = *(uint64_t *)p[3];
  const device_row *row = stand_pointer(table);
  int n = 0;
  if (rows == 0) return 0;
  a[n++] = (stand_access){table, rows * sizeof *row + (rows > 1 ? ((end + %(piece)d - 1) / %(piece)d + 1) * 4 : 0), 0};
  for (uint64_t r = 0; r < rows && n + 2 <= room; r++) {
    if (row[r].bytes == 0 || (row[r].tensor == 0 && !packs)) continue;
    a[n++] = (stand_access){slab + row[r].offset, row[r].bytes, packs};
    if (row[r].tensor) a[n++] = (stand_access){row[r].tensor, row[r].bytes / wire * tensor, !packs};
  }
  return n;
}

static int reduction(void **p, unsigned size, stand_access *a) {
  uint64_t result = *(uint64_t *)p[0], parts = *(uint64_t *)p[1], stride = *(uint64_t *)p[2], own = *(uint64_t *)p[3];
  uint64_t bytes = *(uint64_t *)p[6] * size;
  unsigned mine = *(unsigned *)p[4], count = *(unsigned *)p[5];
  int n = 0;
  if (bytes == 0) return 0;
  for (unsigned k = 0; k < count; k++) a[n++] = (stand_access){k == mine ? own : parts + k * stride, bytes, 0};
  a[n++] = (stand_access){result, bytes, 1};
  return n;
}
"""
ONE = """
ptx_function %(name)s;
static void run_%(name)s(const stand_launch *l, void **p) { run(%(name)s, l, p); }
static int accesses_%(name)s(const stand_launch *l, void **p, stand_access *a, int room) {
  (void)l, (void)room;
  return %(accesses)s;
}
"""


def _accesses(name: str) -> str:
    if match := re.fullmatch(r"(pack|unpack)_([a-z0-9]+)(?:_([a-z0-9]+))?", name):
        tensor, wire = SIZES[match[2]], SIZES[match[3] or match[2]]
        return f"plan(p, {int(match[1] == 'pack')}, {tensor}, {wire}, a, room)"
    return f"reduction(p, {SIZES[name.removeprefix('reduce_')]}, a)"


def build(where: Path, libraries: Path) -> Path:
    """Build the library in `where`, beside its sources."""
    text = PTX.read_text()
    made = ptx.build(text, where)
    names = [kernel.name for kernel in ptx.functions(text)]
    registered = "".join(
        f'  stand_register_kernel("{name}", run_{name});\n  stand_register_accesses("{name}", accesses_{name});\n'
        for name in names
    )
    source = HEAD % {"distance": DISTANCE, "piece": PIECE}
    source += "".join(ONE % {"name": name, "accesses": _accesses(name)} for name in names)
    source += f"\n__attribute__((constructor)) static void enter(void) {{\n{registered}}}\n"
    (where / "registered.c").write_text(source)
    objects = [str(path) for path in sorted(where.glob("kernels*.o"))]
    command = [*COMPILER, "-O1", *LIBRARY, f"-I{ROOT}", str(where / "registered.c"), *objects, f"-L{libraries}"]
    target = where / "registered.so"
    subprocess.run([*command, "-l:libcuda.so.1", "-lm", "-o", str(target)], check=True)
    assert made.exists()
    return target
