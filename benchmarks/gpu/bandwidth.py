"""Part `bandwidth`: speed at which the shipped kernels pack tensors into a slab and unpack them, beside a plain copy.

Tensors are placed as by a framework's allocator, at multiples of 512 bytes, or 4 bytes further. Each kernel cycles
through several sets of tensors and slabs, more than a cache holds, and so does the copy. All launches of a sample are
enqueued while the device fills memory, so that it never waits for one. A bandwidth counts bytes read and written.
Tables of rows are on the device already; the engine copies them before each launch, 24 bytes per row and 4 per 2 KiB.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.driver import BFLOAT16, CudaDriver
from benchmarks.gpu.part import Task
from benchmarks.gpu.reference import round_values, widen_values

AIM = 0.9
PIECE, WARPS, BLOCKS, WARP = 2048, 8, 4096, 32
"""Launch configuration of the engine (engine_ext/gpu/launching.c)."""
SPACING, BESIDE = 512, 4
ROUNDS = 4  # cycles through the sets in a sample
PAUSE, PAUSES = 1 << 30, 4
"""Bytes that the device fills first, and how often: about a millisecond."""
FLOAT = 4


@dataclass(frozen=True)
class Way:
    """Conversion of tensors: the kernels, the dtype in the slab, and the divisor in unpacking."""

    pack: str
    unpack: str
    dtype: str = "float32"
    divisor: float = 1.0


WAYS = {
    "float32": Way("pack_bytes", "unpack_bytes"),
    "float32, an average": Way("pack_float32_float32", "unpack_float32_float32", divisor=3.0),
    "float32 as float16": Way("pack_float32_float16", "unpack_float32_float16", "float16"),
    "float32 as bfloat16": Way("pack_float32_bfloat16", "unpack_float32_bfloat16", BFLOAT16),
}


@dataclass(frozen=True)
class TensorLayout:
    """Number of tensors, and of float32 numbers in each."""

    rows: int
    count: int

    @property
    def title(self) -> str:
        """Description for the tables."""
        from engine.text import readable

        return f"{self.rows} tensors of {readable.format_size(FLOAT * self.count)}"


LAYOUTS = (TensorLayout(4, 4 << 20), TensorLayout(32768, 512), TensorLayout(2000, 256), TensorLayout(20000, 16))
SMALL = (TensorLayout(2, 5000), TensorLayout(60, 50))  # for the stand-in, which runs each thread of a kernel on the CPU


def measure_part(task: Task) -> dict[str, Any]:
    """Measure all layouts.

    Returns `copies`: by layout, bytes and bandwidth of cuMemcpyDtoDAsync in bytes per second. `rows` have `layout`,
    `aligned`, `what`, `direction`, `bandwidth`, and `share` of the copy's. `aim` is the target of the share, None on
    the stand-in, and `problems` are wrong results.
    """
    device = CudaDriver()
    aim = None if task.here["stand_in"] else AIM
    found: dict[str, Any] = {"copies": {}, "rows": [], "aim": aim, "problems": []}
    sets = 2 if task.here["stand_in"] else 4
    bench = CopyBench(device, sets, task.pick_amount(3, 15), 4096 if task.here["stand_in"] else PAUSE)
    for layout in SMALL if task.here["stand_in"] else LAYOUTS:
        copied = bench.copy(layout)
        found["copies"][layout.title] = {"bytes": FLOAT * layout.rows * layout.count, "bandwidth": copied}
        for beside in (0, BESIDE):
            for what, way in WAYS.items():
                if task.left < 0:
                    found["problems"].append("not all was measured: the time was over")
                    return found
                for direction, bandwidth in bench.measure_kernels(layout, beside, way).items():
                    known = {"layout": layout.title, "aligned": not beside, "what": what, "direction": direction}
                    found["rows"].append(known | {"bandwidth": bandwidth, "share": bandwidth / copied})
                if bench.wrong:
                    found["problems"].append(f"{what}, {layout.title}, {beside} bytes beside: {bench.wrong}")
                task.tell(found)
    found["problems"] += device.read_reports()
    return found


class CopyBench:
    """Launcher of kernels that times them by events of the device."""

    def __init__(self, device: CudaDriver, sets: int, samples: int, pause: int) -> None:
        self.device, self.module, self.sets, self.samples = device, device.load_kernels(), sets, samples
        self.pause, self.pause_bytes = device.allocate_memory(pause), pause
        self.begin, self.end = ctypes.c_void_p(), ctypes.c_void_p()
        for event in (self.begin, self.end):
            device.call_driver("cuEventCreate", ctypes.byref(event), 0)
        self.wrong = ""

    def copy(self, layout: TensorLayout) -> float:
        """Return the bandwidth of a copy of as many bytes."""
        nbytes = FLOAT * layout.rows * layout.count
        memory = [self.device.allocate_memory(nbytes) for _ in range(2 * self.sets)]
        for at in memory:
            self.device.call_driver(
                "cuMemsetD8Async", ctypes.c_uint64(at), 0, ctypes.c_size_t(nbytes), self.device.stream
            )

        def copy_once(turn: int) -> None:
            source, target = (ctypes.c_uint64(at) for at in memory[2 * turn : 2 * turn + 2])
            self.device.call_driver("cuMemcpyDtoDAsync_v2", target, source, ctypes.c_size_t(nbytes), self.device.stream)

        seconds = self.time_turns(copy_once)
        for at in memory:
            self.device.free_memory(at)
        return 2 * nbytes / seconds

    def measure_kernels(self, layout: TensorLayout, beside: int, way: Way) -> dict[str, float]:
        """Return the bandwidths of a pair of kernels; `wrong` gets the errors in their results, checked once."""
        sets = [Set(self.device, layout, beside, way) for _ in range(self.sets)]
        moved = layout.rows * layout.count * (FLOAT + sets[0].item)
        packing, unpacking = (self.device.find_kernel(self.module, name) for name in (way.pack, way.unpack))
        packed = self.time_turns(lambda turn: sets[turn].enqueue_kernel(packing, sets[turn].sources, 0))
        unpacked = self.time_turns(lambda turn: sets[turn].enqueue_kernel(unpacking, sets[turn].targets))
        self.wrong = sets[-1].find_errors()
        for each in sets:
            each.free_memory()
        return {"pack": moved / packed, "unpack": moved / unpacked}

    def time_turns(self, once: Any) -> float:
        """Return the median seconds of one turn; several turns are enqueued at a time, each with a set of its own."""
        seconds = []
        for sample in range(self.samples + 1):  # the first one is not counted
            pause, nbytes = ctypes.c_uint64(self.pause), ctypes.c_size_t(self.pause_bytes)
            for _ in range(PAUSES):
                self.device.call_driver("cuMemsetD8Async", pause, 0, nbytes, self.device.stream)
            self.device.call_driver("cuEventRecord", self.begin, self.device.stream)
            for turn in range(ROUNDS * self.sets):
                once(turn % self.sets)
            self.device.call_driver("cuEventRecord", self.end, self.device.stream)
            self.device.synchronize()
            milliseconds = ctypes.c_float()
            self.device.call_driver("cuEventElapsedTime", ctypes.byref(milliseconds), self.begin, self.end)
            if sample:
                seconds.append(max(milliseconds.value, 1e-6) / 1e3 / (ROUNDS * self.sets))  # the stand-in may say 0
        return float(np.median(seconds))


@lru_cache(maxsize=1)
def _values(layout: TensorLayout, beside: int, stride: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return numbers by tensor that float16 represents exactly, and the same in memory layout, with zeros between."""
    values = (np.arange(layout.rows * layout.count) % 251 - 100).astype(np.float32).reshape(layout.rows, -1)
    held = np.zeros((layout.rows, stride), np.uint8)
    held[:, beside : beside + FLOAT * layout.count] = values.view(np.uint8).reshape(layout.rows, -1)
    return values, held


class Set:
    """Tensors to pack, a slab, and tensors to unpack to, with tables of both in the form of the engine's kernels."""

    def __init__(self, device: CudaDriver, layout: TensorLayout, beside: int, way: Way) -> None:
        self.device, self.layout, self.beside, self.way = device, layout, beside, way
        self.item = 2 if way.dtype in ("float16", BFLOAT16) else FLOAT
        each = self.item * layout.count
        self.stride = (FLOAT * layout.count + beside + SPACING - 1) // SPACING * SPACING
        self.step = (each + 15) // 16 * 16
        self.slab_bytes = self.step * (layout.rows - 1) + each
        self.slab = device.allocate_memory(self.slab_bytes)
        self.memory = [device.allocate_memory(self.stride * layout.rows) for _ in range(2)]
        self.values, held = _values(layout, beside, self.stride)
        device.put(self.memory[0], held)
        target, nbytes = ctypes.c_uint64(self.memory[1]), ctypes.c_size_t(held.nbytes)
        device.call_driver("cuMemsetD8Async", target, 0, nbytes, device.stream)
        self.sources, self.targets = (self._make_table(at) for at in self.memory)

    def _make_table(self, memory: int) -> int:
        rows = np.zeros(
            (self.layout.rows, 3), np.uint64
        )  # address, offset in the slab, bytes there (`row`, kernels.cu)
        number = np.arange(self.layout.rows, dtype=np.uint64)
        rows[:, 0] = np.uint64(memory + self.beside) + number * np.uint64(self.stride)
        rows[:, 1] = number * np.uint64(self.step)
        rows[:, 2] = self.item * self.layout.count
        begins = np.arange(-(-self.slab_bytes // PIECE), dtype=np.uint64) * np.uint64(PIECE)
        first = np.searchsorted(rows[:, 1] + rows[:, 2], begins, side="right")  # `for_each_piece`, kernels.cu
        numbers = np.append(2 * first + (rows[first, 1] < begins), 2 * len(rows)).astype(np.uint32)
        table = np.frombuffer(rows.tobytes() + numbers.tobytes(), np.uint8)
        at = self.device.allocate_memory(table.nbytes)
        self.device.put(at, table)
        return at

    def enqueue_kernel(self, kernel: ctypes.c_void_p, table: int, *identity: int) -> None:
        """Enqueue a kernel as the engine does; pass an `identity` if it packs."""
        words = [ctypes.c_uint64(each) for each in (table, self.layout.rows, self.slab_bytes, self.slab, *identity)]
        factors = [ctypes.c_double(self.way.divisor if not identity else 1.0), ctypes.c_double(1.0)]
        given = [ctypes.cast(ctypes.pointer(each), ctypes.c_void_p) for each in (*words, *factors)]
        parameters = (ctypes.c_void_p * len(given))(*given)  # kernels of bytes take no factors
        pieces = -(-self.slab_bytes // PIECE)
        shape = (min(-(-pieces // WARPS), BLOCKS), 1, 1, WARPS * WARP, 1, 1, 0)
        self.device.call_driver("cuLaunchKernel", kernel, *shape, self.device.stream, parameters, None)

    def find_errors(self) -> str:
        """Describe errors in the results of the kernels; empty if there are none."""
        kind = np.dtype(np.uint16 if self.way.dtype == BFLOAT16 else self.way.dtype)
        slab = self.device.get(self.slab, np.empty(self.slab_bytes, np.uint8))
        held = np.zeros(self.step * self.layout.rows, np.uint8)
        held[: self.slab_bytes] = slab
        packed = held.reshape(self.layout.rows, -1)[:, : self.item * self.layout.count].copy().view(kind)
        dtype = self.way.dtype
        if not np.array_equal(widen_values(packed, dtype), widen_values(round_values(self.values, dtype), dtype)):
            return "what was packed is wrong"
        got = self.device.get(self.memory[1], np.empty((self.layout.rows, self.stride), np.uint8))
        inside = got[:, self.beside : self.beside + FLOAT * self.layout.count].copy().view(np.float32)
        if not np.array_equal(inside, self.values / np.float32(self.way.divisor)):
            return "what was unpacked is wrong"
        got[:, self.beside : self.beside + FLOAT * self.layout.count] = 0
        return "bytes beside the tensors were written" if got.any() else ""

    def free_memory(self) -> None:
        """Free all memory, which must not be in use."""
        self.device.synchronize()
        for at in (self.slab, *self.memory, self.sources, self.targets):
            self.device.free_memory(at)
