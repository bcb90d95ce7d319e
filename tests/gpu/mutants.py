"""The sources of the GPU plane with one thing wrong, and how a process of the tests comes to run them.

Each has a test that fails with it (test_plane.py). In a process with LANE_LIBRARY the thread is that of this library,
made of a changed lane.c; with PLANE_SOURCE the module `engine.gpu.plane` is this file.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from ..standins import LIBRARY, ROOT, compiled

LANE = ROOT / "engine_ext/gpu/lane.c"
PLANE = ROOT / "engine/gpu/plane.py"

# By name: the file, what stands there, what it is replaced by.
MUTANTS: dict[str, tuple[Path, str, str]] = {
    "init_not_polled": (LANE, "if (state != ncclInProgress) return", "return"),
    "poll_not_given_up": (LANE, "    NCCL_STEP(ncclCommGetAsyncError,", "    STEP(NCCL(ncclCommGetAsyncError,"),
    "calls_not_given_up": (LANE, "return load32_acquire(&l->cancelled) ? failed", "return 0 ? failed"),
    "launches_not_awaited": (LANE, "  return drain(l, 0);", "  return 0;"),
    "drain_does_not_wait": (LANE, "if (code != CUDA_ERROR_NOT_READY) return", "return"),
    "drain_not_given_up": (LANE, 'now_ns() - begun > limit : cancelled(l, "cuStreamQuery")', "0 : 0"),
    "close_does_not_drain": (LANE, "  if (l->stream != NULL) drain(l, DRAIN_NS);\n", ""),
    "end_not_rung": (LANE, "    door_ring(&l->ended, DOOR_EVERYBODY);\n", ""),
    "job_not_rung": (LANE, "  door_ring(&l->door, 1);\n", ""),
    "wait_does_not_sleep": (
        LANE,
        "!= LANE_NOTHING) door_sleep(&l->ended, count, ns)",
        "!= LANE_NOTHING) (void)count, (void)ns",
    ),
    "capture_mode_not_set": (LANE, "  CUDA_STEP(cuThreadExchangeStreamCaptureMode, &mode);\n", "  (void)mode;\n"),
    "blocking_stream": (LANE, "CU_STREAM_NON_BLOCKING, greatest", "CU_STREAM_DEFAULT, least"),
    "communicator_not_ended": (LANE, "  if (l->comm != NULL) NCCL(ncclCommAbort, l->comm);\n", ""),
    "failure_not_looked_at": (PLANE, " and self.engine.failure is None:", ":"),
    "lane_without_limit": (PLANE, "not lane.wait(TICK) and self.patience.left() and", "not lane.wait(TICK) and"),
    "return_without_limit": (PLANE, "if not lane.wait(RETURN):", "while not lane.wait(RETURN):"),
    "exchange_without_limit": (PLANE, "if not patience.left():", "if False:"),
    "stuck_is_closed": (PLANE, "if self.lane is not None and self.lane not in _stuck:", "if self.lane is not None:"),
    "forked_child_closes": (PLANE, "if self._open and os.getpid() == self._pid:", "if self._open:"),
}


def changed(mutant: str, where: Path) -> dict[str, str]:
    """Make a mutant, or with `none` what is as it should be: the variables of a process that is to run it."""
    path, old, new = MUTANTS.get(mutant, (LANE, "", ""))
    text = path.read_text()
    if mutant != "none":
        assert text.count(old) == 1, f"{mutant}: {text.count(old)} times in {path.name}: {old}"
        text = text.replace(old, new)
        if mutant == "poll_not_given_up":
            text = text.replace(
                "STEP(NCCL(ncclCommGetAsyncError, l->comm, &state);",
                "STEP(NCCL(ncclCommGetAsyncError, l->comm, &state));",
            )
    where.mkdir(parents=True, exist_ok=True)
    if path == PLANE:
        (where / "plane.py").write_text(text)
        return {"PLANE_SOURCE": str(where / "plane.py")}
    (where / "lane.c").write_text(text)
    options = [f'-DLANE_SOURCE="{where / "lane.c"}"', f"-I{ROOT / 'engine_ext/gpu'}", "-Wno-unused-parameter", *LIBRARY]
    return {"LANE_LIBRARY": str(compiled(where / "lane.so", [Path(__file__).parent / "lane_glue.c"], *options))}


def take_place() -> None:
    """In a process that is to run a mutant: put it in the place of the source."""
    if library := os.environ.get("LANE_LIBRARY"):
        import engine_ext.gpu.lane

        Lane.glue = _glue(library)
        engine_ext.gpu.lane.Lane = Lane  # type: ignore[misc, assignment]
    if source := os.environ.get("PLANE_SOURCE"):
        import engine.gpu

        spec = importlib.util.spec_from_file_location("engine.gpu.plane", source)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["engine.gpu.plane"] = engine.gpu.plane = module  # type: ignore[attr-defined]
        spec.loader.exec_module(module)


class Failure(ctypes.Structure):
    """`lane_failure`."""

    _fields_ = (
        ("call", ctypes.c_char_p),
        ("code", ctypes.c_int),
        ("name", ctypes.c_char * 64),
        ("text", ctypes.c_char * 2048),
    )


class Identity(ctypes.Structure):
    """`lane_identity`."""

    _fields_ = (
        ("driver", ctypes.c_int),
        ("devices", ctypes.c_int),
        ("name", ctypes.c_char * 128),
        ("pci", ctypes.c_char * 32),
        ("uuid", ctypes.c_ubyte * 16),
    )


def _glue(library: str) -> ctypes.CDLL:
    glue = ctypes.CDLL(library)
    for name, kind in {
        "new": ctypes.c_void_p,
        "call": ctypes.c_char_p,
        "failure": ctypes.POINTER(Failure),
        "identity": ctypes.POINTER(Identity),
        "id": ctypes.POINTER(ctypes.c_char * 128),
        "stream": ctypes.c_void_p,
        "kernel": ctypes.c_void_p,
    }.items():
        getattr(glue, f"glue_{name}").restype = kind
    return glue


class Lane:
    """`engine_ext.gpu.lane.Lane`, of another library."""

    glue: ctypes.CDLL

    def __init__(
        self, addresses: list[int], ordinal: int, rank: int, size: int, image: bytes, kernels: list[bytes]
    ) -> None:
        self.kept = (ctypes.c_size_t * len(addresses))(*addresses), image, (ctypes.c_char_p * len(kernels))(*kernels)
        table, text, names = self.kept
        made = self.glue.glue_new(table, ordinal, rank, size, ctypes.c_char_p(text), names, len(kernels))
        self.state = ctypes.c_void_p(made)

    def begin(self, job: str, id: bytes | None = None) -> None:
        number = 1 + ["identify", "prepare", "name", "connect", "close"].index(job)
        self.glue.glue_begin(self.state, number, ctypes.c_char_p(id))

    def wait(self, seconds: float) -> bool:
        return bool(self.glue.glue_wait(self.state, ctypes.c_ulonglong(int(seconds * 1e9) or 1)))

    def cancel(self) -> None:
        self.glue.glue_cancel(self.state)

    def join(self) -> None:
        self.glue.glue_join(self.state)

    @property
    def call(self) -> str | None:
        found = self.glue.glue_call(self.state)
        return None if found is None else found.decode()

    @property
    def failure(self) -> tuple[str, int, str, str] | None:
        found = self.glue.glue_failure(self.state).contents
        return (
            None if found.call is None else (found.call.decode(), found.code, found.name.decode(), found.text.decode())
        )

    @property
    def identity(self) -> dict[str, int | str]:
        found = self.glue.glue_identity(self.state).contents
        told: dict[str, Any] = {name: getattr(found, name) for name in ("driver", "devices")}
        return {**told, "name": found.name.decode(), "pci": found.pci.decode(), "uuid": bytes(found.uuid).hex()}

    @property
    def id(self) -> bytes:
        return self.glue.glue_id(self.state).contents.raw

    @property
    def left(self) -> bool:
        return bool(self.glue.glue_left(self.state))

    @property
    def stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.glue.glue_stream(self.state))

    def kernel(self, number: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.glue.glue_kernel(self.state, number))
