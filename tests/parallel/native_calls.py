"""The native call as compiled code of a framework uses it: by a small C library (native_calls.c), from plain threads.

driver = Driver()
call = driver.call("allreduce", [array], name="x")
driver.submit(call)
call.wait()
assert call.status == "OK" and (call.targets[0] == ...).all()
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from ctypes import (
    CFUNCTYPE,
    POINTER,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from engine.native import setup
from engine_ext.bindings.calls import address

ROOT = Path(__file__).resolve().parents[2]
HEADER = (ROOT / "engine_ext/bindings/calls.h").read_text()
SOURCE = Path(__file__).with_suffix(".c")
DIMS = 12
FOREVER = 2**64 - 1
GROUP, UNNAMED, MARKS_STEP = 1, 2, 4
SECONDS = 60.0
# Values of `status` by number, under the header's names: OK, REFUSED ..
STATUSES = re.findall(r"ENGINE_CALL_(\w+)", HEADER[HEADER.index("enum {") : HEADER.index("};")])
CODES = setup.codes()
OPS = {name.capitalize(): number for number, name in enumerate(CODES["reductions"])}
WIRES = {"none": 0, "fp16": 1, "bf16": 2, "tuned": 255}


class Tensor(ctypes.Structure):
    _fields_ = [
        ("source", c_void_p),
        ("target", c_void_p),
        ("dtype", c_int32),
        ("ndim", c_int32),
        ("dims", c_int64 * DIMS),
    ]


class NativeCall(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("set", c_int32),
        *((name, c_uint8) for name in ("kind", "op", "wire", "flags")),
        ("root", c_int32),
        ("prescale", c_double),
        ("postscale", c_double),
        ("name", c_char_p),
        ("name_bytes", c_uint32),
        ("count", c_uint32),
        ("tensors", POINTER(Tensor)),
        ("splits", POINTER(c_int64)),
        ("done", c_void_p),
        ("argument", c_void_p),
        ("linger_ns", c_uint64),
        ("optimizer", c_int32),
        ("padding", c_int32),
        ("fault", c_char_p),
    ]


class Outcome(ctypes.Structure):
    _fields_ = [
        ("call", NativeCall),
        ("then", c_void_p),
        ("parameter", c_void_p),
        *((name, c_uint32) for name in ("left", "times", "finished")),
        ("status", c_int32),
        ("ranks", c_int32),
        ("count", c_uint32),
        ("held_gil", c_uint32),
        ("thread", c_int32),
        ("submitter", c_int32),
        ("inside", c_uint32),
        ("signals", c_uint32),
        *((name, c_uint64) for name in ("floats", "order", "begun", "returned", "ended")),
        ("memory", c_void_p),
        ("bytes", c_uint64),
        ("rows", POINTER(c_int64)),
        ("parts", c_void_p),
        ("part_bytes", POINTER(c_uint64)),
        ("part_rows", POINTER(c_int64)),
        ("text", c_char_p),
    ]


Then = CFUNCTYPE(None, POINTER(Outcome))


class Calls(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("version", c_uint32),
        ("submit", c_void_p),
        ("place", CFUNCTYPE(c_int, c_int32, POINTER(c_int32), POINTER(c_int32))),
        ("part_rows", c_void_p),
        ("part_copy", c_void_p),
    ]


class Call:
    """One call, to be submitted once or, when it is done, again."""

    def __init__(
        self,
        driver: Driver,
        kind: str,
        tensors: Sequence[Any],
        *,
        name: str | bytes | None = None,
        op: str = "Sum",
        dtypes: Sequence[str] | None = None,
        in_place: bool = False,
        prescale: float = 1.0,
        postscale: float = 1.0,
        root: int = 0,
        splits: Sequence[int] | None = None,
        wire: str = "none",
        group: bool = False,
        set: int = 0,
        linger: int = 0,
        flags: int = 0,
        optimizer: int = 0,
    ) -> None:
        self.driver = driver
        self.kind = kind
        self.sources = [np.ascontiguousarray(each).reshape(np.shape(each)) for each in tensors]
        self.dtypes = list(dtypes) if dtypes is not None else [str(each.dtype) for each in self.sources]
        # Outputs; empty where the engine allocates the result
        self.targets = self.sources if in_place else [self._target(each, driver, set) for each in self.sources]
        self._tensors = (Tensor * max(1, len(self.sources)))()
        for tensor, source, target, dtype in zip(self._tensors, self.sources, self.targets, self.dtypes, strict=False):
            tensor.source = source.ctypes.data if source.size else None
            tensor.target = target.ctypes.data if target.size else None
            tensor.dtype, tensor.ndim = CODES["dtypes"].index(dtype), source.ndim
            tensor.dims[: source.ndim] = list(source.shape)
        self.outcome = Outcome()
        self.native = call = self.outcome.call  # the submitted struct; tests may corrupt it before
        text = name.encode() if isinstance(name, str) else name
        self._kept: list[Any] = [text]
        call.struct_size, call.set, call.kind = ctypes.sizeof(NativeCall), set, CODES["operations"].index(kind)
        call.op, call.wire, call.root = OPS[op], WIRES[wire], root
        call.flags = flags | GROUP * group | UNNAMED * (name is None)
        call.prescale, call.postscale = prescale, postscale
        call.name, call.name_bytes = text, len(text or b"")
        call.count, call.tensors = len(self.sources), self._tensors
        if splits is not None:
            call.splits = (c_int64 * len(splits))(*splits)
        call.linger_ns, call.optimizer = linger, optimizer
        driver.calls.append(self)

    def _target(self, source: Any, driver: Driver, set: int) -> Any:
        if self.kind in ("allgather", "alltoall", "barrier"):
            return np.empty(0, source.dtype)
        if self.kind == "reducescatter" and source.ndim:
            rank, size = driver.place(set)
            rows = source.shape[0] // size + (rank < source.shape[0] % size)
            return np.empty((rows, *source.shape[1:]), source.dtype)
        return np.empty_like(source)

    @property
    def tensors(self) -> Any:
        """Native tensors, which tests may corrupt."""
        return self._tensors

    def then(self, what: str | Callable[[Call], None], parameter: int = 0, left: int = 0) -> Call:
        """Let `done` continue with a function of native_calls.c, or with Python."""
        if isinstance(what, str):
            self.outcome.then = ctypes.cast(getattr(self.driver.library, what), c_void_p).value
        else:
            function = Then(lambda _: what(self))
            self._kept.append(function)
            self.outcome.then = ctypes.cast(function, c_void_p).value
        self.outcome.parameter, self.outcome.left = parameter, left
        return self

    @property
    def address(self) -> int:
        return ctypes.addressof(self.outcome)

    def wait(self, seconds: float = SECONDS, times: int = 1) -> Call:
        """Wait for the end; fail if it does not come."""
        self.driver.wait([self], seconds, times)
        return self

    @property
    def status(self) -> str:
        """Status by its name in the header: `OK`, `MISMATCH` .."""
        return STATUSES[self.outcome.status]

    @property
    def text(self) -> str:
        """Text of the failure; empty if the call succeeded."""
        return (self.outcome.text or b"").decode()

    @property
    def rows(self) -> list[int]:
        """Number of rows from each rank."""
        return self.outcome.rows[: self.outcome.ranks]

    @property
    def gathered(self) -> Any:
        """Gathered or exchanged rows of one tensor."""
        assert self.outcome.memory and self.outcome.memory % 64 == 0, hex(self.outcome.memory or 0)
        data = ctypes.string_at(self.outcome.memory, self.outcome.bytes)
        source = self.sources[0]
        return np.frombuffer(data, source.dtype).reshape(sum(self.rows), *source.shape[1:])

    @property
    def gathered_group(self) -> list[tuple[Any, list[int]]]:
        """Gathered rows of each tensor of a group, and the number of rows from each rank."""
        assert self.outcome.memory and self.outcome.memory % 64 == 0, hex(self.outcome.memory or 0)
        parts, at, ranks = [], self.outcome.parts, self.outcome.ranks
        for k, source in enumerate(self.sources):
            data = ctypes.string_at(at, self.outcome.part_bytes[k])
            rows = self.outcome.part_rows[k * ranks : (k + 1) * ranks]
            parts.append((np.frombuffer(data, source.dtype).reshape(sum(rows), *source.shape[1:]), rows))
            at += len(data)
        return parts


class Driver:
    """The C library, and the table of the engine's native calls.

    As a context manager, it checks at its end that every submitted call was done once.
    """

    def __init__(self) -> None:
        self.table = ctypes.cast(address(), POINTER(Calls)).contents
        self.library = library()
        self.calls: list[Call] = []

    def place(self, set: int = 0) -> tuple[int, int]:
        """This rank's number in a process set, and the number of ranks."""
        rank, size = c_int32(), c_int32()
        status = STATUSES[self.table.place(set, rank, size)]
        if status != "OK":
            raise LookupError(status)
        return rank.value, size.value

    def call(self, kind: str, tensors: Sequence[Any], **options: Any) -> Call:
        """Make a call; the parameters are those of `Call`."""
        return Call(self, kind, tensors, **options)

    def submit(self, *calls: Call, threads: int = 1) -> None:
        """Submit calls in order from a plain thread, or call k from thread k % threads."""
        assert self.library.submit_from(self._all(calls), len(calls), threads) == 0

    def submit_here(self, call: Call) -> Call:
        """Submit a call on this thread, without the GIL."""
        self.library.submit_here(c_void_p(call.address))
        return call

    def run(self, kind: str, tensors: Sequence[Any], **options: Any) -> Call:
        """Make a call, submit it from a plain thread, and wait for its end."""
        call = self.call(kind, tensors, **options)
        self.submit(call)
        return call.wait()

    def wait(self, calls: Iterable[Call], seconds: float = SECONDS, times: int = 1) -> None:
        """Wait until calls are done, `times` times each."""
        calls = list(calls)
        if not self.library.wait_for(self._all(calls), len(calls), times, c_uint64(int(seconds * 1e9))):
            late = [f"{call.kind} {call.native.name}" for call in calls if call.outcome.finished < times]
            raise AssertionError(f"{len(late)} of {len(calls)} calls were not done within {seconds} s: {late[:10]}")

    def timed(self, call: Call, times: int) -> list[float]:
        """Microseconds from submission to `done` of a call that is submitted repeatedly."""
        ns = (c_uint64 * times)()
        assert self.library.one_after_the_other(c_void_p(call.address), times, ns), "one took a minute"
        return [each / 1e3 for each in ns]

    def _all(self, calls: Sequence[Call]) -> Any:
        return (c_void_p * len(calls))(*(call.address for call in calls))

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is not None:
            return
        for call in self.calls:
            about = f"{call.kind} {call.native.name}: {call.outcome.times} times done, status {call.outcome.status}"
            assert not call.outcome.begun or call.outcome.times == call.outcome.finished >= 1, about
            assert call.outcome.held_gil == 0, about
            self.library.forget(c_void_p(call.address))


def compiled(directory: Path) -> Path:
    """C library, compiled in `directory` by the first process that asks."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "native_calls.so"
    with open(directory / "native_calls.lock", "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if not path.exists():
            preloaded = os.environ.get("LD_PRELOAD", "")
            sanitizer = ["-fsanitize=thread"] if "libtsan" in preloaded else []
            command = [*os.environ.get("CC", "cc").split(), "-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror"]
            command += [*sanitizer, "-shared", "-fPIC", "-pthread", f"-I{ROOT}", str(SOURCE), "-o", f"{path}.part"]
            subprocess.run(command, check=True)
            os.replace(f"{path}.part", path)
    return path


@cache
def library() -> Any:
    """C library of this process; ranks share it in their working directory."""
    if "RANK" in os.environ:
        found = ctypes.CDLL(str(compiled(Path("native_calls").absolute())))
    else:
        with tempfile.TemporaryDirectory() as directory:
            found = ctypes.CDLL(str(compiled(Path(directory))))
    found.open_calls.restype = found.forget.restype = found.open_gate.restype = found.submit_here.restype = None
    found.flush_denormals.restype = None
    for name in ("size_of_call", "size_of_outcome", "default_floats"):
        getattr(found, name).restype = c_uint64
    found.open_calls(c_void_p(address()), ctypes.cast(ctypes.pythonapi.PyGILState_Check, c_void_p))
    assert found.size_of_call() == ctypes.sizeof(NativeCall), found.size_of_call()
    assert found.size_of_outcome() == ctypes.sizeof(Outcome), found.size_of_outcome()
    return found
