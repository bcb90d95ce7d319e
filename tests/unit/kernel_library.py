"""The kernels' C interface for their tests, compiled on the spot and called through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_double, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

NATIVE = Path(__file__).parents[2] / "engine_ext"
LIBRARY = "KERNELS_LIBRARY"  # path of a library that `build` has made elsewhere, for a machine without a compiler
SANITIZED = "KERNELS_SANITIZED"  # set in the environment of the run that test_sanitizers_find_nothing starts
X86 = platform.machine() == "x86_64"
LEVELS = ["plain", "avx2", "avx512"] if X86 else ["plain"]
FLAGS = {
    "plain": [],
    "avx2": ["-mavx2", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mf16c"],
}
DTYPES = [
    *("float16", "bfloat16", "float32", "float64"),
    *("int8", "uint8", "int16", "uint16", "int32", "int64", "bool"),
]
STORED = {"bfloat16": np.uint16, "bool": np.uint8}
OPS = ["sum", "average", "min", "max", "product"]
NO_SOURCE, EVERY_SOURCE = -1, -2
SHIM = """
#include "kernels/kernels.h"
#include "platform/cpu.h"
/* One reduction on a thread whose float environment is `theirs`; returns what it is afterwards. */
uint64_t reduce_in(uint64_t theirs, int guarded, const engine_kernels *k, const engine_reduction *r,
                   const void *const *sources, void *const *destinations, size_t n) {
  uint64_t before = engine_float_save(), saved = 0, after;
  engine_float_restore(theirs);
  if (guarded) saved = engine_float_enter();
  k->reduce(r, sources, destinations, n);
  if (guarded) engine_float_leave(saved);
  after = engine_float_save();
  engine_float_restore(before);
  return after;
}
"""


class Accumulation(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("widen", CFUNCTYPE(None, c_void_p, c_void_p, c_size_t)),
        ("combine", CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_size_t)),
        ("fold", CFUNCTYPE(None, c_void_p, c_void_p, c_size_t)),
        ("finish", CFUNCTYPE(None, c_void_p, c_void_p, c_double, c_double, c_size_t)),
    ]


class TypeKernels(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("scale", CFUNCTYPE(None, c_void_p, c_void_p, c_double, c_size_t)),
        ("ops", Accumulation * len(OPS)),
    ]


class Reduction(ctypes.Structure):
    _fields_ = [
        *((name, c_int) for name in ("dtype", "op", "tensor", "count", "unscaled", "copies", "streaming")),
        *((name, c_double) for name in ("prescale", "divisor", "postscale")),
    ]


class Kernels(ctypes.Structure):
    _fields_ = [
        ("copy", CFUNCTYPE(None, c_void_p, c_void_p, c_size_t)),
        ("copy_streaming", CFUNCTYPE(None, c_void_p, c_void_p, c_size_t)),
        ("pack", CFUNCTYPE(None, c_int, c_int, c_double, c_int, c_void_p, c_void_p, c_size_t)),
        ("unpack", CFUNCTYPE(None, c_int, c_int, c_void_p, c_void_p, c_size_t)),
        ("reduce", CFUNCTYPE(None, POINTER(Reduction), POINTER(c_void_p), POINTER(c_void_p), c_size_t)),
        ("reduce_onward", CFUNCTYPE(None, POINTER(Reduction), c_void_p, POINTER(c_void_p), c_void_p, c_size_t)),
        ("reduce_last", CFUNCTYPE(None, POINTER(Reduction), c_void_p, POINTER(c_void_p), POINTER(c_void_p), c_size_t)),
        ("types", TypeKernels * len(DTYPES)),
        ("inner", CFUNCTYPE(None, c_int, POINTER(c_double), POINTER(c_void_p), c_int, c_size_t)),
        ("weigh", CFUNCTYPE(None, c_int, c_void_p, POINTER(c_void_p), POINTER(c_double), c_int, c_size_t)),
        ("encode", CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_size_t)),
        ("decode", CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_size_t)),
        ("decode_add", CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_size_t)),
        ("to_float", CFUNCTYPE(None, c_int, c_double, c_void_p, c_void_p, c_size_t)),
        ("from_float", CFUNCTYPE(None, c_int, c_void_p, c_void_p, c_size_t)),
    ]


def build(directory: Path) -> Path:
    """Compile the kernels as the build does, with sanitizers on request."""
    if LIBRARY in os.environ:
        return Path(os.environ[LIBRARY])
    compiler = os.environ.get("CC", "gcc")
    if shutil.which(compiler) is None:
        pytest.skip(f"no C compiler {compiler!r}")
    sanitize = (
        ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g"]
        if SANITIZED in os.environ
        else ["-O3"]
    )
    shim = directory / "shim.c"
    shim.write_text(SHIM)
    common = [
        compiler,
        "-std=c11",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fPIC",
        "-Wall",
        "-Wextra",
        "-Werror",
        *sanitize,
    ]
    sources = [(NATIVE / "kernels" / f"kernels_{level}.c", FLAGS[level]) for level in LEVELS]
    sources += [(NATIVE / "kernels" / "kernels.c", []), (NATIVE / "platform" / "cpu.c", []), (shim, [])]
    objects = [directory / f"{source.stem}.o" for source, _ in sources]
    running = [
        subprocess.Popen([*common, *flags, f"-I{NATIVE}", "-c", source, "-o", obj])
        for (source, flags), obj in zip(sources, objects, strict=True)
    ]
    assert [process.wait() for process in running] == [0] * len(running)
    library = directory / "kernels.so"
    subprocess.run([compiler, "-shared", *sanitize, *objects, "-o", library], check=True)
    return library


def build_once(directory: Path) -> Path:
    """Return the library that `build` makes of the present sources, from a directory that outlives a run."""
    version = subprocess.run([os.environ.get("CC", "gcc"), "--version"], check=False, capture_output=True).stdout
    sources = [Path(__file__), *sorted(NATIVE.rglob("*.[ch]"))]
    digest = hashlib.sha256(b"\0".join([version, *(path.read_bytes() for path in sources)]))
    library = directory / f"kernels-{digest.hexdigest()[:16]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=directory) as draft:
            os.replace(build(Path(draft)), library)
    return library


def load(path: Path) -> ctypes.CDLL:
    lib = ctypes.CDLL(str(path))
    lib.engine_kernels_get.restype = POINTER(Kernels)
    lib.engine_kernels_name.restype = c_char_p
    lib.reduce_in.restype = c_uint64
    arrays = [POINTER(c_void_p), POINTER(c_void_p), c_size_t]
    lib.reduce_in.argtypes = [c_uint64, c_int, POINTER(Kernels), POINTER(Reduction), *arrays]
    return lib


def runnable(library: ctypes.CDLL) -> list[Kernels]:
    """Kernels of every level that this processor supports."""
    tables = [library.engine_kernels_get(level) for level in range(len(LEVELS))]
    return [table.contents for table in tables if table]


def stored(dtype: str) -> np.dtype:
    return np.dtype(STORED.get(dtype, dtype))


GUARD = 0xA5


class Buffer:
    """`n` elements, `offset` elements past a 64-byte boundary, between guard bytes."""

    def __init__(self, dtype: np.dtype, n: int, offset: int = 0) -> None:
        self.memory = np.full(n * dtype.itemsize + 256 + offset * dtype.itemsize, GUARD, np.uint8)
        start = -self.memory.ctypes.data % 64 + 64 + offset * dtype.itemsize
        self.span = slice(start, start + n * dtype.itemsize)
        self.values = self.memory[self.span].view(dtype)

    @property
    def address(self) -> int:
        return self.memory.ctypes.data + self.span.start

    def assert_guards(self) -> None:
        assert (self.memory[: self.span.start] == GUARD).all()
        assert (self.memory[self.span.stop :] == GUARD).all()


def buffer_of(values: np.ndarray, offset: int = 0) -> Buffer:
    buffer = Buffer(values.dtype, len(values), offset)
    buffer.values[:] = values
    return buffer


@dataclass
class Spec:
    dtype: str
    op: str
    unscaled: int = NO_SOURCE
    prescale: float = 1.0
    divisor: float = 1.0
    postscale: float = 1.0
    tensor: str | None = None  # tensors' dtype in a compressed reduction

    def native(self, count: int, copies: int, streaming: bool) -> Reduction:
        return Reduction(
            DTYPES.index(self.dtype), OPS.index(self.op), DTYPES.index(self.tensor or self.dtype), count, self.unscaled,
            copies, streaming,
            self.prescale, self.divisor, self.postscale,
        )  # fmt: skip


def pointers(buffers: list[Buffer]) -> ctypes.Array[c_void_p]:
    return (c_void_p * len(buffers))(*(b.address for b in buffers))


def call_reduce(
    kernels: Kernels, spec: Spec, sources: list[Buffer], destinations: list[Buffer], streaming: bool = False
) -> None:
    native = spec.native(len(sources), len(destinations), streaming)
    kernels.reduce(ctypes.byref(native), pointers(sources), pointers(destinations), len(sources[0].values))
    for b in [*sources, *destinations]:
        b.assert_guards()


def reduced(kernels: Kernels, spec: Spec, sources: list[np.ndarray], offset: int = 0) -> np.ndarray:
    out = Buffer(sources[0].dtype, len(sources[0]), offset)
    call_reduce(kernels, spec, [buffer_of(s, offset) for s in sources], [out])
    return out.values
